"""The state pieces that a checkpoint sees: complete, counted once, and enough to go on elsewhere."""

import pytest
import torch
from torch import nn

from megatron_ds.mpu.param_spec import DATA_AXES, Init, ParamSpec
from megatron_ds.optim import default_groups
from megatron_ds.zero.data_groups import DataGroups
from megatron_ds.zero.loss_scale import LossScale, ScalerRule
from megatron_ds.zero.optimizer import ZeroOptimizer
from megatron_ds.zero.set_plan import ParameterUse
from megatron_ds.zero.settings import STAGES, ZeroSettings
from tests.harness.gradients import taken
from tests.harness.threads import run_ranks

pytestmark = pytest.mark.threads

SHAPES = {"embedding": (31, 5), "weight": (13, 17), "bias": (7,)}
KINDS = ("weight", "exp_avg", "exp_avg_sq")


def build(rank, world, size, stage, dtype):
    parameters = []
    for i, (name, shape) in enumerate(SHAPES.items()):
        p = nn.Parameter(
            torch.randn(shape, generator=torch.Generator().manual_seed(i)).to(dtype)
        )
        p.spec = ParamSpec(name, shape, Init("normal", 1.0), decay=len(shape) > 1)
        parameters.append(p)
    settings = ZeroSettings(
        default_groups(lambda g: torch.optim.AdamW(g, fused=True)),
        STAGES[stage],
        bucket_elements=200,
        clip_grad=1.0,
        persistence=8,
        make_scaler=lambda: (
            LossScale(256.0, ScalerRule(True, window=2))
            if dtype == torch.float16
            else LossScale()
        ),
    )
    groups = DataGroups({DATA_AXES: world.group("dp-cp", range(size), rank)})
    return (
        parameters,
        ZeroOptimizer(
            parameters,
            settings,
            groups,
            ParameterUse({0: [parameters[:1], parameters[1:]]}),
        ),
    )


def whole(optimizer, parameters):
    with optimizer.gathered(0):
        return [p.detach().clone() for p in parameters]


def take_steps(parameters, optimizer, steps):
    """The same gradient on all ranks, so that the number of ranks does not matter."""
    for step in steps:
        optimizer.begin_step()
        for i, p in enumerate(parameters):
            g = torch.randn(
                p.shape, generator=torch.Generator().manual_seed(1000 * step + i)
            )
            taken(p).add_(g * optimizer.loss_scale)
        optimizer.step(0.01, 0.1)


def store(pieces, logical):
    for piece in pieces:
        if piece.replica == 0:
            whole = logical.setdefault(
                (piece.kind, piece.spec.name),
                torch.full((piece.spec.numel,), torch.nan),
            )
            assert whole[piece.start : piece.stop].isnan().all(), (
                "an element was given twice"
            )
            whole[piece.start : piece.stop] = piece.tensor


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_pieces_of_all_ranks_cover_each_element_of_each_kind_once_before_the_first_step(
    stage,
):
    results = run_ranks(
        3,
        lambda rank, world: list(
            build(rank, world, 3, stage, torch.bfloat16)[1].pieces()
        ),
    )
    logical = {}
    for pieces in results:
        store(pieces, logical)
    assert set(logical) == {(kind, name) for kind in KINDS for name in SHAPES}
    for i, (name, shape) in enumerate(SHAPES.items()):
        initial = (
            torch.randn(shape, generator=torch.Generator().manual_seed(i))
            .bfloat16()
            .float()
            .flatten()
        )
        assert torch.equal(logical["weight", name], initial)
        assert (
            not logical["exp_avg", name].any() and not logical["exp_avg_sq", name].any()
        )
    replicas = {
        (piece.replica, piece.replicas) for pieces in results for piece in pieces
    }
    assert replicas == ({(0, 3), (1, 3), (2, 3)} if stage == 0 else {(0, 1)})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    "before, after",
    [
        ((2, 1), (3, 1)),
        ((3, 1), (1, 0)),
        ((2, 0), (2, 1)),
        ((2, 3), (3, 2)),
        ((3, 2), (2, 3)),
        ((2, 3), (1, 0)),
        ((2, 0), (3, 3)),
        ((1, 3), (2, 3)),
        ((2, 1), (2, 3)),
    ],
)
def test_a_run_goes_on_in_another_layout_as_if_nothing_had_happened(
    before, after, dtype
):
    def first(rank, world):
        parameters, optimizer = build(rank, world, *before, dtype)
        take_steps(parameters, optimizer, range(3))
        saved = (
            [(p, p.tensor.clone()) for p in optimizer.pieces()],
            optimizer.extra_state(),
        )
        take_steps(parameters, optimizer, range(3, 5))
        return saved, whole(optimizer, parameters), optimizer.extra_state()

    results = run_ranks(before[0], first)
    logical = {}
    for (pieces, _), _, _ in results:
        for piece, value in pieces:
            piece.tensor.copy_(value)
        store([piece for piece, _ in pieces], logical)

    def second(rank, world):
        parameters, optimizer = build(rank, world, *after, dtype)
        for piece in optimizer.pieces():
            piece.tensor.fill_(torch.nan)
            piece.tensor.copy_(
                logical[piece.kind, piece.spec.name][piece.start : piece.stop]
            )
        optimizer.load_extra_state(results[0][0][1])
        optimizer.after_load()
        take_steps(parameters, optimizer, range(3, 5))
        return whole(optimizer, parameters), optimizer.extra_state()

    for parameters, extra in run_ranks(after[0], second):
        assert extra == results[0][2] and extra["num_updates"] == 5
        for got, expected in zip(parameters, results[0][1]):
            # Equal gradients on 2 ranks average exactly, on 3 ranks up to rounding; clipping sees another
            # summation order.
            torch.testing.assert_close(
                got, expected, rtol=2e-6 if dtype == torch.float32 else 1e-3, atol=1e-7
            )


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_same_layout_resumes_bit_equal(stage):
    def main(rank, world):
        parameters, optimizer = build(rank, world, 2, stage, torch.float16)
        take_steps(parameters, optimizer, range(3))
        resumed, other = build(rank, world, 2, stage, torch.float16)
        for mine, theirs in zip(other.pieces(), optimizer.pieces()):
            mine.tensor.copy_(theirs.tensor)
        other.load_extra_state(optimizer.extra_state())
        other.after_load()
        for ps, o in ((parameters, optimizer), (resumed, other)):
            take_steps(ps, o, range(3, 6))
        same = all(
            torch.equal(a, b)
            for a, b in zip(whole(optimizer, parameters), whole(other, resumed))
        )
        return same and optimizer.extra_state() == other.extra_state()

    assert run_ranks(2, main) == [True, True]
