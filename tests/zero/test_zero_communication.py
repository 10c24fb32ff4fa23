"""Gradients that travel in another dtype than they accumulate in, and divided meanwhile, against the same
sums by hand."""

import math

import pytest
import torch
from torch import nn

from megatron_ds.mpu.group import solo
from megatron_ds.mpu.managed_parameter import accumulator_of
from megatron_ds.mpu.param_spec import DATA_AXES, Init, ParamSpec
from megatron_ds.optim import default_groups
from megatron_ds.zero.data_groups import DataGroups
from megatron_ds.zero.optimizer import ZeroOptimizer
from megatron_ds.zero.set_plan import ParameterUse
from megatron_ds.zero.settings import STAGES, ZeroSettings
from tests.harness.gradients import contribute
from tests.harness.threads import run_ranks

pytestmark = pytest.mark.threads

SIZES, N = (7, 1300, 65, 513), 3
WIRES = [
    (torch.float32, torch.bfloat16, 1.0),
    (torch.float32, torch.float16, 1.0),
    (torch.float32, torch.float16, 8.0),
    (torch.float32, torch.float16, None),
    (torch.bfloat16, torch.float32, 1.0),
    (torch.float32, torch.float32, 3.0),
]


def make_optimizer(
    data,
    stage,
    bucket_elements=500,
    grad_dtype=torch.float32,
    sent_dtype=None,
    sent_divisor=1.0,
):
    """Weights of zero and plain descent with rate 1: after a step they are minus the gradient."""
    parameters = []
    for i, size in enumerate(SIZES):
        p = nn.Parameter(torch.zeros(size))
        p.spec = ParamSpec(f"p{i}", (size,), Init("zeros"))
        parameters.append(p)
    settings = ZeroSettings(
        default_groups(lambda g: torch.optim.SGD(g, lr=1.0)),
        STAGES[stage],
        bucket_elements=bucket_elements,
        persistence=0,
        grad_dtype=grad_dtype,
        sent_dtype=sent_dtype,
        sent_divisor=sent_divisor,
    )
    use = ParameterUse({0: [parameters[:2], parameters[2:]]})
    return parameters, ZeroOptimizer(
        parameters, settings, DataGroups({DATA_AXES: data}), use
    )


def gradient(rank, microbatch, i):
    return torch.randn(
        SIZES[i],
        generator=torch.Generator().manual_seed(100 * rank + 10 * microbatch + i),
    )


def take_step(parameters, optimizer, gradient_of, microbatches=1, arm_each=False):
    optimizer.begin_step()
    for k in range(microbatches):
        if arm_each or k == microbatches - 1:
            optimizer.arm()
        for i, p in reversed(list(enumerate(parameters))):
            contribute(p, gradient_of(k, i))
    result = optimizer.step(1.0, 0.0)
    with optimizer.gathered(0):
        return result, [-p.detach().clone() for p in parameters]


def summed(terms, sent, divisor, accumulates):
    """What arrives, given each rank's own sum."""
    factor = float(N) if divisor is None else divisor
    total = None
    for term in terms:
        travelling = (term.to(accumulates).float() * (1 / factor)).to(sent)
        total = travelling if total is None else total + travelling
    return (total.to(accumulates) * factor).float()


@pytest.mark.parametrize("bucket_elements", [1, 500, 10_000])
@pytest.mark.parametrize("accumulates, sent, divisor", WIRES)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_are_cast_for_the_sum_only_whatever_the_bucket(
    stage, accumulates, sent, divisor, bucket_elements
):
    def main(rank, world):
        made = make_optimizer(
            world.group("dp-cp", range(N), rank),
            stage,
            bucket_elements,
            accumulates,
            sent,
            divisor,
        )
        return take_step(*made, lambda k, i: gradient(rank, k, i))[1]

    for got in run_ranks(N, main):
        for i, g in enumerate(got):
            assert torch.equal(
                g,
                summed(
                    [gradient(r, 0, i) for r in range(N)], sent, divisor, accumulates
                ),
            )


@pytest.mark.parametrize(
    "stage, arm_each", [(0, False), (1, False), (2, False), (2, True), (3, True)]
)
def test_micro_batches_accumulate_in_the_wider_dtype(stage, arm_each):
    def main(rank, world):
        made = make_optimizer(
            world.group("dp-cp", range(N), rank), stage, sent_dtype=torch.bfloat16
        )
        return [
            take_step(*made, lambda k, i: gradient(rank, k, i), 3, arm_each)[1]
            for _ in range(2)
        ][0]

    by_hand = lambda terms: summed(terms, torch.bfloat16, 1.0, torch.float32)
    for got in run_ranks(N, main):
        for i, g in enumerate(got):
            of = lambda r, k: gradient(r, k, i)  # noqa: B023
            expected = (
                sum(by_hand([of(r, k) for r in range(N)]) for k in range(3))
                if arm_each
                else by_hand([of(r, 0) + of(r, 1) + of(r, 2) for r in range(N)])
            )
            assert torch.equal(g, expected)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_divisor_keeps_a_sum_within_the_range_of_fp16(stage):
    def main(rank, world):
        data, seen = world.group("dp-cp", range(N), rank), []
        for divisor in (1.0, 4.0, None):
            made = make_optimizer(
                data, stage, sent_dtype=torch.float16, sent_divisor=divisor
            )
            seen.append(take_step(*made, lambda k, i: 40_000.0))
        return seen

    for (overflow, _), (result, exact), (_, prescaled) in run_ranks(N, main):
        assert overflow.skipped and not math.isfinite(
            overflow.grad_norm
        )  # 3 · 40000 > 65504
        assert not result.skipped and all((g == 120_000.0).all() for g in exact)
        for g in prescaled:
            # a third is rounded
            torch.testing.assert_close(
                g, torch.full_like(g, 120_000.0), rtol=1e-3, atol=0
            )


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_rank_sends_nothing_so_nothing_is_rounded(stage):
    made = make_optimizer(
        solo("dp-cp"), stage, sent_dtype=torch.bfloat16, sent_divisor=None
    )
    _, got = take_step(*made, lambda k, i: gradient(0, k, i))
    assert all(torch.equal(g, gradient(0, 0, i)) for i, g in enumerate(got))


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_two_buffers_carry_any_number_of_buckets(stage):
    def main(rank, world):
        parameters, optimizer = make_optimizer(
            world.group("dp-cp", range(N), rank), stage, 64, sent_dtype=torch.bfloat16
        )
        for _ in range(2):
            take_step(parameters, optimizer, lambda k, i: gradient(rank, k, i))
        longest = max(
            b.stop - b.start for s in optimizer.sets for b in s.plan.layout.buckets
        )
        return optimizer.exchange.nbytes <= 2 * 2 * longest

    assert all(run_ranks(N, main))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_first_gradient_of_a_step_overwrites_and_none_at_all_is_zero(stage):
    def main(rank, world):
        parameters, optimizer = make_optimizer(
            world.group("dp-cp", range(2), rank), stage
        )
        before = [torch.zeros(size) for size in SIZES]
        for given in ({0, 1, 2, 3}, {1, 3}, {0, 2}, set()):
            optimizer.begin_step()
            optimizer.arm()
            for i in sorted(given, reverse=True):
                accumulator = accumulator_of(parameters[i])
                assert accumulator.is_new
                accumulator.write(lambda total, overwrites, i=i: total.fill_(1.0 + i))
                assert not accumulator.is_new
                contribute(parameters[i], 0.5)
            norm = optimizer.step(1.0, 0.0).grad_norm
            moved = [2 * (1.5 + i) if i in given else 0.0 for i in range(len(SIZES))]
            assert norm == pytest.approx(
                math.sqrt(sum(m * m * size for m, size in zip(moved, SIZES)))
            )
            with optimizer.gathered(0):
                after = [-p.detach().clone() for p in parameters]
            for a, b, m in zip(after, before, moved, strict=True):
                assert torch.equal(a - b, torch.full_like(a, m))
            before = after

    run_ranks(2, main)
