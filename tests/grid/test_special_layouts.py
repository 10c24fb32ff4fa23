"""Layouts that are compared with one process in a way of their own, or whose sizes the grid does not have."""

import math

import pytest
import torch

from megatron_ds.context_parallel.head_exchange import ToTokens
from megatron_ds.extensions.kernels.cpu import compiled_attention
from tests.harness.layout_comparison import Difference
from tests.harness.layout_runs import (
    GLOBAL_BATCH,
    NUM_LAYERS,
    reference_of,
    run_layout,
    stray,
)
from tests.harness.tiny_jobs import SEQ_LENGTH, TOLERANCE, tiny_job

pytestmark = [pytest.mark.threads, pytest.mark.one_in(6)]

STEPS, FP16_STEPS = 4, 10


def check(job: list[str], layout: str, limit: Difference = TOLERANCE["fp32"]):
    """The run, which is like that of one process."""
    difference, run = stray(job, layout, STEPS)
    assert difference.is_within(limit), difference
    return run


@pytest.mark.parametrize(
    "style, layout, scale",
    [
        ("gpt2", "tp=2,pp=2,dp=2,zero=1", 2.0**24),
        ("llama", "tp=1,pp=4,dp=2,zero=0,recompute=full", 2.0**24),
        ("gpt2", "tp=2,pp=2,dp=2,zero=1,sp=1", 2.0**12),
        ("llama", "cp=2,pp=2", 2.0**12),
        ("gpt2", "tp=2,pp=2,dp=2,zero=3", 2.0**24),
        ("gpt2", "dp=2,zero=3,offload=cpu,offload_param=cpu", 2.0**24),
        ("llama", "pp=2,dp=2,zero=2,offload=cpu,ratio=0.5", 2.0**24),
        ("llama", "dp=2,zero=2,accumulate=full", 2.0**24),
    ],
)
def test_fp16_overflows_and_recovers_alike_in_every_layout(style, layout, scale):
    """At 2**24 the first steps overflow and the scale sinks until they do not; then it rises again, and one
    more does.

    Not where ranks share a sequence: a norm's gradient is then summed in two halves, and each half may fit
    where the whole does not, so that the scale sinks once less.
    """
    job = [
        *tiny_job(style, "fp16", False, 0.0, 4, GLOBAL_BATCH, FP16_STEPS),
        *"--hysteresis 1 --loss-scale-window 2".split(),
    ]
    job[job.index("--initial-loss-scale") + 1] = str(scale)
    difference, run = stray(job, layout, FP16_STEPS)
    assert difference.is_within(TOLERANCE["fp16"]), difference
    overflows = [not math.isfinite(norm) for norm in run.merged[0].grad_norms]
    assert any(overflows[:4]) == any(overflows[6:]) == (scale > 2**20)
    assert not all(overflows[6:])
    assert run.seen[0].dtypes == {torch.float16}


@pytest.mark.parametrize(
    "growth",
    [
        "--rampup-batch-size 4 4 8",
        f"--step-batch-size-schedule 0:4 {8 * SEQ_LENGTH}:8",
    ],
)
def test_a_growing_batch_gives_every_layout_the_same_samples(growth):
    job = tiny_job("gpt2", "fp32", False, 0.1, NUM_LAYERS, 8, 4)
    for name, samples in (
        ("--train-iters", "--train-samples"),
        ("--lr-warmup-iters", "--lr-warmup-samples"),
    ):
        at = job.index(name)
        job[at : at + 2] = [samples, str(int(job[at + 1]) * 8)]
    growing = [*job, *growth.split()]
    difference, run = stray(growing, "tp=2,pp=2,dp=2,zero=1,sp=1", 4)
    assert difference.is_within(TOLERANCE["fp32"]), difference
    assert {s.forwards for s in run.seen} == {2 * 2 + 2 * 4}
    assert run.merged[0].losses != reference_of(job, "", 4).merged[0].losses


def test_tokens_that_weigh_alike_make_the_micro_batch_size_a_matter_of_layout():
    job = tiny_job("llama", "fp32", True, 0.1, NUM_LAYERS, GLOBAL_BATCH, STEPS)
    by_token = [*job, "--calculate-per-token-loss"]
    losses = check(by_token, "tp=2,pp=2,sp=1,mbs=2").merged[0].losses
    one_by_one = reference_of(by_token, "mbs=1", STEPS).merged[0].losses
    assert losses == pytest.approx(one_by_one, rel=1e-6)
    by_micro_batch = reference_of(job, "mbs=1", STEPS).merged[0].losses
    assert by_micro_batch != pytest.approx(one_by_one, rel=1e-4)


@pytest.mark.parametrize(
    "style, layout, stages",
    [
        # 8 micro-batches, 3 ranks
        ("gpt2", "pp=2,dp=2,zero=2,chunks=3,accumulate=full", 3),
        ("llama", "pp=3,chunks=2,zero=1", 2),
        ("gpt2", "pp=2,dp=2,zero=3,schedule=zb-v,pin=1,layout=Et*2|t*3|t|L", 2),
        ("gpt2", "pp=3,schedule=zb-v,recompute=full,mbs=2", 2),
        ("gpt2", "tp=2,pp=2,dp=2,zero=1,recompute=full,layout=Et|t*5L", 1),
    ],
)
def test_stages_of_a_rank_may_be_many_uneven_and_no_divisor_of_the_micro_batches(
    style, layout, stages
):
    run = check(tiny_job(style, "fp32", False, 0.1, 6, 8, STEPS), layout)
    assert {len(s.stages) for s in run.seen} == {stages}


@pytest.mark.parametrize(
    "style, layout",
    [
        ("llama", "dp=3,zero=3,recompute=selective"),
        ("gpt2", "dp=6,zero=2"),
        ("llama", "dp=3,zero=3,persist=100000"),
        ("gpt2", "cp=3,comm_type=all_gather"),
        ("llama", "cp=3,zero=1"),
    ],
)
def test_ranks_need_not_be_a_power_of_two(style, layout):
    check(tiny_job(style, "fp32", False, 0.1, NUM_LAYERS, 6, STEPS), layout)


def test_the_size_of_buckets_changes_no_bit_of_the_gradient():
    job = tiny_job("gpt2", "fp32", False, 0.0, NUM_LAYERS, GLOBAL_BATCH, STEPS)
    job[job.index("--clip-grad") + 1] = "0"  # the norm adds squares in another order
    for zero in (1, 2, 3):
        (_, one), (_, other) = (
            run_layout(job, f"dp=2,zero={zero},bucket={bucket}", STEPS).merged
            for bucket in (500, 10**6)
        )
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_gradients_in_sixteen_bits_stray_no_further_than_sixteen_bits_may():
    job = tiny_job("llama", "bf16", True, 0.0, NUM_LAYERS, GLOBAL_BATCH, STEPS)
    run = check(job, "dp=2,tp=2,pp=2,zero=3,grads=bf16", TOLERANCE["bf16"])
    held, elements = (
        sum(getattr(s, name) for s in run.seen)
        for name in ("gradient_bytes", "dense_elements")
    )
    # half of the elements each, two bytes an element
    assert held == pytest.approx(elements / 2 * 2, rel=0.25)


# ------------------------------------------------------------------ ranks that share sequences
@pytest.mark.skipif(
    compiled_attention.reason_against(torch.float32) != "",
    reason="no compiled attention on this machine",
)
@pytest.mark.parametrize(
    "style, comm, flags, layout",
    [
        ("llama", "p2p a2a p2p", "", "cp=2"),
        ("llama", "a2a", "", "cp=2,tp=2,sp=1,recompute=selective"),
        ("gpt2", "a2a", "--softmax-type learnable --window-size 9,0", "cp=4,pp=2"),
        ("gpt2", "a2a", "--position-embedding-type alibi", "cp=2,recompute=full"),
        ("bert", "a2a", "", "cp=2,dp=2,zero=3"),
        ("llama", "p2p", "", "cp=4,pp=2"),
    ],
)
def test_ranks_with_compiled_attention_train_like_one_process(
    style, comm, flags, layout, monkeypatch
):
    """Heads have 32 channels. Ranks of a2a take D of their tokens' rows in place of a second output."""
    kept, before = [], ToTokens.of_rows
    monkeypatch.setattr(
        ToTokens, "of_rows", lambda *given: kept.append(1) or before(*given)
    )
    documents = "joined" if style == "bert" else "apart"
    size = (NUM_LAYERS, GLOBAL_BATCH, STEPS)
    job = tiny_job(style, "fp32", style == "llama", 0.0, *size, documents)
    channels = ["--kv-channels", "32"]
    check([*job, *channels, "--cp-comm-type", *comm.split(), *flags.split()], layout)
    assert bool(kept) == ("a2a" in comm and "selective" not in layout)


def test_each_layer_may_share_attention_in_its_own_way():
    size = (NUM_LAYERS, GLOBAL_BATCH, STEPS)
    job = tiny_job("llama", "fp32", True, 0.1, *size, "apart")
    kinds = ["--cp-comm-type", "p2p", "a2a", "all_gather"]
    run = check([*job, *kinds], "cp=2,pp=2,zero=1")
    calls = {
        operation
        for seen in run.seen
        for operation, axes, _ in seen.traffic.calls
        if axes == "cp"
    }
    assert {"send", "all_to_all", "all_gather"} <= calls
