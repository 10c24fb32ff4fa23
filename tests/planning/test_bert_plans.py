"""What a plan of a BERT says: FLOPs by hand, --dry-run, the entry script."""

import subprocess

import pytest

from megatron_ds.config import parse
from megatron_ds.config.options.model import ModelConfig
from megatron_ds.extensions.dry_run.world_plan import plan_world
from megatron_ds.models import MODELS
from megatron_ds.planning.flops import layers_of, model_flops
from megatron_ds.planning.layer_costs import time_layers
from tests.harness.documents import ROOT
from tests.harness.limits import HUNG
from tests.harness.model_runs import context_of
from tests.harness.operation_clock import layers_timed_by_operations
from tests.harness.warm import warm_python
from tests.planning.test_flops import layer_flops

pytestmark = pytest.mark.plan

BASE = (
    "--model bert --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--micro-batch-size 2 --global-batch-size 16 --vocab-size 130 --mock-data --lr 1 "
    "--train-iters 1 --make-vocab-size-divisible-by 8"
).split()


def test_flops_are_the_matrix_products_counted_by_hand():
    model = ModelConfig(
        model="bert",
        num_layers=2,
        hidden_size=12,
        num_attention_heads=3,
        seq_length=7,
        ffn_hidden_size=20,
    )
    products = [(7, 12, 36), (7, 12, 12), (7, 12, 20), (7, 20, 12)]
    # all the scores
    block = (
        sum(2 * rows * inner * columns for rows, inner, columns in products)
        + 2 * 2 * 3 * 7 * 7 * 4
    )
    head = 2 * 7 * 12 * 12 + 2 * 7 * 12 * 99 + 2 * 12 * 12 + 2 * 12 * 2
    assert layer_flops(model, "block", 7, 99) == 3 * block
    assert layer_flops(model, "bert_head", 7, 99) == 3 * head
    assert model_flops(layers_of(model), 5, 7, 99) == 5 * 3 * (2 * block + head)


@pytest.mark.parametrize(
    "flags",
    [
        [],
        "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2".split(),
        "--pipeline-model-parallel-size 4 --zero-stage 3 --pipeline-schedule zb-h1".split(),
    ],
    ids=" ".join,
)
def test_a_plan_counts_the_bytes_and_messages_of_the_binary_head(flags):
    of = lambda *more: plan_world(
        parse([*BASE, *flags, *more], world_size=8), device="cpu"
    )
    pairs, single = of(), of("--bert-no-binary-head")
    assert pairs.parameters - single.parameters == 64 * 64 + 64 + 2 * 64 + 2 + 2 * 64
    report = [
        plan.pipeline_ranks[-1].traffic.bytes["all_reduce", "tp-cp-dp-pp", 8]
        for plan in (pairs, single)
    ]
    assert report == [6 * 8, 4 * 8]
    first = [
        plan.pipeline_ranks[-1].traffic.bytes.get(("broadcast", "tp", 2), 0)
        for plan in (pairs, single)
    ]
    microbatches = pairs.microbatches
    assert first == [
        microbatches * 2 * 64 * 4 if "--sequence-parallel" in flags else 0,
        0,
    ]


def test_layers_are_timed_with_what_a_bert_reads():
    config = parse(BASE)
    with layers_timed_by_operations():
        times = time_layers(config, context_of())
    assert set(times) == {
        layer.kind for layer in MODELS["bert"](config.model, context_of())
    }
    assert all(cost.forward > 0 and cost.weight_grad > 0 for cost in times.values()), (
        times
    )
    assert [kind for kind, cost in times.items() if cost.input_grad == 0] == [
        "bert_embedding"
    ]


def test_the_entry_script_plans_a_bert():
    large = (
        "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 512 --lr 1e-4 "
        "--micro-batch-size 4 --global-batch-size 1024 --train-iters 10 --vocab-size 30522 "
        "--world-size 64 --dry-run"
    ).split()
    command = [warm_python(), str(ROOT / "pretrain_bert.py"), *large]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HUNG)
    assert done.returncode == 0, done.stdout + done.stderr
    # 24 blocks of 12 h² + 13 h, embeddings of words, positions and segments, two norms, a dense layer each,
    # and the biases
    h, v = 1024, 30522
    count = (
        24 * (12 * h * h + 13 * h)
        + (v + 512 + 2) * h
        + 2 * 2 * h
        + 2 * (h * h + h)
        + v
        + 2 * h
        + 2
    )
    assert f"the model has {count:,} parameters (336.2 M)" in done.stdout
    assert "0, the worst" in done.stdout and "data: none are given" in done.stdout
