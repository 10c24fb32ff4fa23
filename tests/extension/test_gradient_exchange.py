"""Another way to exchange gradients is one new file: sign compression with error feedback (Karimireddy et al.
2019).

Each rank sends one sign per element and one scale per bucket of its gradient plus the error of its last
compression. The expected weights are computed by hand from the same gradients.
"""

import pytest
import torch
from torch import nn

from megatron_ds.mpu.collectives import all_gather
from megatron_ds.mpu.group import DONE
from megatron_ds.mpu.param_spec import DATA_AXES, Init, ParamSpec
from megatron_ds.optim import default_groups
from megatron_ds.zero.data_groups import DataGroups
from megatron_ds.zero.optimizer import ZeroOptimizer
from megatron_ds.zero.set_plan import ParameterUse
from megatron_ds.zero.settings import STAGES, ZeroSettings
from tests.harness.gradients import contribute
from tests.harness.threads import run_ranks

SIZES, N, STEPS = (
    (128, 640, 256),
    2,
    3,
)  # without padding, which would count in the scale; a bucket each


class SignExchange:
    """Sums sign(g + error) · mean |g + error| over the ranks; keeps the rest as the error of the next
    step."""

    def __init__(self):
        self.errors: dict[str, torch.Tensor] = {}

    @property
    def nbytes(self):
        return sum(error.nbytes for error in self.errors.values())

    def planned_bytes(self, longest, ranks):
        return longest * 4

    def sent(self, numel, buckets, ranks, *, sharded):
        yield (
            "all_gather",
            ranks.data,
            ranks.data.size * numel,
            buckets,
        )  # one byte an element
        yield (
            "all_gather",
            ranks.data,
            ranks.data.size * 4 * buckets,
            buckets,
        )  # and a scale

    def begin(self):
        pass

    def reduce(self, bucket):
        error = self.errors.setdefault(bucket.name, torch.zeros_like(bucket.whole))
        corrected = bucket.whole + error
        scale = corrected.abs().mean().view(1)
        error.copy_(corrected - corrected.sign() * scale)
        signs = all_gather(corrected.sign().to(torch.int8), bucket.ranks.data).view(
            bucket.ranks.data.size, -1
        )
        scales = all_gather(scale, bucket.ranks.data)
        total = (signs * scales[:, None]).sum(0)[
            bucket.start : bucket.start + bucket.out.numel()
        ]
        bucket.out.add_(total) if bucket.add else bucket.out.copy_(total)
        return DONE

    def finish(self):
        pass


def gradient(rank, step, i):
    return torch.randn(
        SIZES[i], generator=torch.Generator().manual_seed(100 * rank + 10 * step + i)
    )


def by_hand():
    """The weights after the steps of plain descent with rate 1, from zero, and each rank's errors."""
    weights = [torch.zeros(size) for size in SIZES]
    errors = [[torch.zeros(size) for size in SIZES] for _ in range(N)]
    for step in range(STEPS):
        for i, w in enumerate(weights):
            for rank in range(N):
                corrected = gradient(rank, step, i) + errors[rank][i]
                compressed = corrected.sign() * corrected.abs().mean()
                errors[rank][i] = corrected - compressed
                w -= compressed
    return weights, errors


def train(rank, world, stage):
    parameters = []
    for i, size in enumerate(SIZES):
        parameters.append(nn.Parameter(torch.zeros(size)))
        parameters[-1].spec = ParamSpec(f"p{i}", (size,), Init("zeros"))
    exchange = SignExchange()
    settings = ZeroSettings(
        default_groups(lambda g: torch.optim.SGD(g, lr=1.0)),
        STAGES[stage],
        bucket_elements=1,
        exchange=lambda settings, device: exchange,
        persistence=0,
    )
    use = ParameterUse({0: [[p] for p in parameters]})
    optimizer = ZeroOptimizer(
        parameters,
        settings,
        DataGroups({DATA_AXES: world.group("dp-cp", range(N), rank)}),
        use,
    )
    for step in range(STEPS):
        optimizer.begin_step()
        optimizer.arm()
        for i, p in reversed(list(enumerate(parameters))):
            contribute(p, gradient(rank, step, i))
        optimizer.step(1.0)
    traffic = world.traffic[rank].bytes["all_gather", "dp-cp", N]
    with optimizer.gathered(0):
        weights = [p.detach().clone() for p in parameters]
    return (
        weights,
        exchange,
        optimizer.working_bytes,
        optimizer.traffic(1, True, False),
        traffic,
    )


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_sign_compression_with_error_feedback_plugs_in_at_every_stage(stage):
    weights, errors = by_hand()
    for rank, (got, exchange, working, planned, counted) in enumerate(
        run_ranks(N, lambda *at: train(*at, stage))
    ):
        for a, b in zip(got, weights):
            torch.testing.assert_close(
                a, b
            )  # the sum of three steps rounds in another order
        for i, error in enumerate(errors[rank]):
            assert (
                torch.equal(exchange.errors[f"p{i}"], error)
                or (exchange.errors[f"p{i}"] - error).abs().max() < 1e-5
            )
        assert exchange.nbytes == 4 * sum(SIZES) <= working
        if stage == 0:
            assert planned["all_gather", "dp-cp"] * STEPS == counted
