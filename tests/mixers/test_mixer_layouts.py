"""Models with mixers train in every layout as in one process, keep the planned bytes, and record the FLOPs of their
formulas."""

import pytest
import torch

from megatron_ds.config import parse
from megatron_ds.extensions.mixers.linear_scan import CHUNK
from megatron_ds.mpu.managed_parameter import spec_of
from megatron_ds.ops.work import Product
from megatron_ds.planning.flops import layers_of, layers_of_run, model_flops
from tests.harness.layout_runs import GLOBAL_BATCH, run_layout, stray
from tests.harness.tiny_jobs import TOLERANCE
from tests.plan_time.test_recorded_work import (
    formula_flops,
    planned,
    recorded_flops,
)
from tests.planning.test_activations import kept

BASE = (
    "--hidden-size 24 --num-attention-heads 4 --seq-length 16 --vocab-size 61 --make-vocab-size-divisible-by 4 "
    f"--global-batch-size {GLOBAL_BATCH} --train-iters 4 --lr 1e-1 --optimizer sgd --hidden-dropout 0.1 "
    "--attention-dropout 0.1 --mock-data"
)
DELTA = "--linear-num-key-heads 4 --linear-num-value-heads 8 --linear-key-head-dim 6 --linear-value-head-dim 4 "
MAMBA = (
    "--mamba-num-groups 4 --mamba-num-heads 8 --mamba-head-dim 6 --mamba-state-dim 5 "
)
JOBS = {
    "blocks": f"--num-layers 3 --linear-attention-freq 3 --attention-output-gate {DELTA}",
    "mamba blocks": (
        f"--num-layers 3 --linear-attention-freq [1,0,1] --linear-attention-type mamba {MAMBA}"
    ),
    "side by side": (
        "--num-layers 3 --linear-attention-freq [1,0,1] --linear-attention-type mamba_beside_attention "
        f"{MAMBA} --mamba-norm before_gate --swiglu --softmax-scale 0.3 "
        "--mixer-multipliers 0.9 0.8 1.3 0.5 0.4 0.3 0.7 1.2 0.3 0.9 0.6"
    ),
    "norms behind": (
        f"--num-layers 3 --linear-attention-freq [1,0,0] --norms-behind-attention --qk-layernorm-of-all-heads {DELTA} "
        "--linear-norm-epsilon 1e-4 --normalization RMSNorm --group-query-attention --num-query-groups 4"
    ),
    "halves": (
        f"--num-layers 6 --mixer-pattern M-*EGM --num-experts 4 --moe-router-topk 2 {DELTA} {MAMBA} "
        "--disable-bias-linear --normalization RMSNorm"
    ),
}
TWO_BY_TWO = "tp=2,cp=2,comm_type=a2a"
LAYOUTS = {
    "blocks": (
        "tp=2,sp=1",
        "tp=2,pp=3,schedule=zb-h1",
        "dp=2,zero=1",
        "dp=2,zero=2",
        "dp=2,zero=3",
        "cp=2,comm_type=a2a",
        f"{TWO_BY_TWO},sp=1",
        "tp=4,recompute=selective",
        "pp=2,recompute=full",
    ),
    "mamba blocks": ("tp=2,sp=1", "cp=4,comm_type=a2a", "dp=2,zero=3,recompute=full"),
    "norms behind": (f"{TWO_BY_TWO},sp=1", "pp=2,recompute=full", "dp=2,zero=3"),
    "side by side": (f"{TWO_BY_TWO},sp=1", "dp=2,zero=3,recompute=selective"),
    "halves": (
        "tp=2,sp=1",
        "tp=4",
        "pp=3",
        "ep=2,dp=2,zero=2",
        "dp=4,zero=3",
        f"{TWO_BY_TWO},sp=1",
        "tp=2,pp=2,recompute=selective",
        "cp=2,comm_type=a2a,recompute=full",
    ),
}


def job_of(name: str, more: str = "") -> list[str]:
    return f"{BASE} {JOBS[name]} {more}".split()


def cases(which):
    quick = {("blocks", f"{TWO_BY_TWO},sp=1"), ("halves", "tp=2,sp=1")}
    return [
        pytest.param(
            name, layout, marks=[] if (name, layout) in quick else [pytest.mark.rest]
        )
        for name, layouts in which.items()
        for layout in layouts
    ]


@pytest.mark.threads
@pytest.mark.parametrize("name, layout", cases(LAYOUTS))
def test_a_layout_trains_as_one_process(name, layout):
    difference, run = stray(job_of(name), layout, 3)
    assert difference.is_within(TOLERANCE["fp32"]), f"{layout}: {difference}"
    mixed = [layer for seen in run.seen for layer in seen.layers if ".in_proj" in layer]
    assert mixed


@pytest.mark.threads
@pytest.mark.parametrize("name", JOBS)
def test_documents_in_a_sample_are_kept_apart_in_layouts(name):
    apart = job_of(name, "--reset-position-ids --reset-attention-mask")
    difference, _ = stray(apart, f"{TWO_BY_TWO},sp=1", 2)
    assert difference.is_within(TOLERANCE["fp32"]), difference


DROPS = "--random-ltd --random-ltd-min-tokens 8 --random-ltd-steps 4 --random-ltd-tokens-per-step 4"


@pytest.mark.threads
@pytest.mark.rest
@pytest.mark.parametrize(
    "name, layout",
    (
        ("blocks", "tp=2,sp=1"),
        ("halves", "tp=2,pp=2,recompute=selective"),
        ("side by side", f"{TWO_BY_TWO},sp=1"),
    ),
)
def test_layers_that_drop_tokens_train_as_in_one_process(name, layout):
    flags = job_of(name, DROPS)
    difference, run = stray(flags, layout, 3)
    assert difference.is_within(TOLERANCE["fp32"]), difference
    whole, _ = run_layout(job_of(name), "tp=1,pp=1,dp=1", 3).merged
    assert abs(run.merged[0].losses[0] - whole.losses[0]) > 1e-6


ADAPTERS = "--lora-rank 2 --lora-target-modules in_proj,out_proj,linear_qkv,linear_fc1"


@pytest.mark.threads
@pytest.mark.rest
@pytest.mark.parametrize(
    "name, layout",
    (
        ("blocks", f"{TWO_BY_TWO},sp=1"),
        ("halves", "tp=2,sp=1"),
        ("halves", "ep=2,dp=2,zero=3"),
        ("side by side", "tp=2,pp=3"),
    ),
)
def test_adapters_of_mixers_train_as_in_one_process(name, layout):
    flags = job_of(name, f"{ADAPTERS} --lora-dropout 0.1")
    difference, run = stray(flags, layout, 3)
    assert difference.is_within(TOLERANCE["fp32"]), difference
    trained = {name for name in run.merged[1] if ".lora_" in name}
    assert any(".in_proj.lora_b" in name for name in trained)
    assert any(".out_proj.lora_a" in name for name in trained)


@pytest.mark.threads
@pytest.mark.rest
@pytest.mark.parametrize("name", JOBS)
def test_recomputation_changes_no_bit(name):
    (trace, weights), *others = [
        run_layout(job_of(name), f"tp=1,pp=1,dp=1{how}", 3).merged
        for how in ("", ",recompute=full", ",recompute=selective")
    ]
    for other, their_weights in others:
        assert other.losses == trace.losses and other.grad_norms == trace.grad_norms
        assert all(torch.equal(their_weights[n], w) for n, w in weights.items())


@pytest.mark.threads
@pytest.mark.rest
@pytest.mark.parametrize("dtype", ("bf16", "fp16"))
@pytest.mark.parametrize("layout", ("tp=2,sp=1,dp=2,zero=1", "dp=2,zero=3", "pp=2"))
def test_numbers_of_the_state_stay_in_fp32_in_models_of_16_bits(dtype, layout):
    flags = {"bf16": "--bf16", "fp16": "--fp16 --initial-loss-scale 1024"}[dtype]
    difference, run = stray(job_of("halves", flags), layout, 3)
    assert difference.is_within(TOLERANCE[dtype]), difference
    assert run.seen[0].dtypes == {
        getattr(torch, {"bf16": "bfloat16", "fp16": "float16"}[dtype]),
        torch.float32,
    }


@pytest.mark.plan
@pytest.mark.parametrize("name", JOBS)
def test_a_stage_keeps_the_planned_bytes(name):
    flags = job_of(name, "--seq-length 24 --micro-batch-size 2")
    blocks = int(JOBS[name].split()[1])
    for layers in (slice(0, 3), slice(2, blocks + 3)):
        measured, _, plan = kept(flags, 2, layers)
        assert measured == plan


@pytest.mark.plan
@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize(
    "flags, world",
    (
        ("", 1),
        ("--tensor-model-parallel-size 2 --sequence-parallel", 2),
        ("--context-parallel-size 2 --cp-comm-type a2a", 2),
        ("--recompute-granularity full", 1),
        ("--recompute-granularity selective", 1),
    ),
    ids=("one process", "tensor", "context", "full", "selective"),
)
def test_recorded_flops_are_those_of_the_formulas(name, flags, world):
    plan = planned(
        f"{JOBS[name]} --attention-dropout 0 --seq-length 200 {flags}", world, "cuda"
    )
    expected = formula_flops(plan)
    if "selective" in flags:
        # What is repeated ends where backward has what it needs, before the last product of the last chunk.
        mixers = plan.config.model.mixer_kinds.count("G")
        expected -= mixers * Product(8, CHUNK, 4, CHUNK).flops
    assert recorded_flops(plan) == pytest.approx(expected, rel=1e-12)


@pytest.mark.plan
@pytest.mark.parametrize("name", ("blocks", "side by side", "mamba blocks"))
def test_flops_with_adapters_are_those_of_their_weights_and_of_frozen_ones(name):
    """Four of six FLOPs of a frozen weight, six of each weight of an adapter."""
    plain = parse(job_of(name, "--micro-batch-size 2"))
    config = parse(job_of(name, f"--micro-batch-size 2 {ADAPTERS}"))
    layers = layers_of_run(config)
    names = [
        (spec_of(weight).name, weight.numel())
        for layer in layers
        if layer.is_block
        for weight in layer.make().parameters()
    ]
    adapters = sum(count for name, count in names if ".lora_" in name)
    whole = model_flops(layers_of(plain.model), 1, 16, 61)
    scores = sum(layer.flops(16, 61).scores for layer in layers_of(plain.model))
    expected = (whole - scores) * 2 / 3 + scores + 6 * 16 * adapters
    assert adapters
    assert model_flops(layers, 1, 16, 61) == pytest.approx(expected)
