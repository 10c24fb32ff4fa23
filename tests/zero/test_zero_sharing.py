"""Parameters that several ranks hold or share: tensor-parallel parts and copies, partial sums, ties, experts.

Gradients are written by hand, so the whole gradient and its norm are known in closed form.
"""

import pytest
import torch
from torch import nn

from megatron_ds.mpu.group import solo
from megatron_ds.mpu.managed_parameter import accumulator_of
from megatron_ds.mpu.param_spec import (
    DATA_AXES,
    EXPERT_DATA_AXES,
    Init,
    ParamSpec,
    Split,
)
from megatron_ds.optim import default_groups
from megatron_ds.zero.data_groups import DataGroups
from megatron_ds.zero.optimizer import ZeroOptimizer
from megatron_ds.zero.set_plan import SHARED, ParameterUse
from megatron_ds.zero.settings import STAGES, ZeroSettings
from tests.harness.gradients import contribute, taken
from tests.harness.threads import run_ranks

pytestmark = pytest.mark.threads


def parameter(name, shape, **spec):
    p = nn.Parameter(torch.zeros(shape))
    p.spec = ParamSpec(name, tuple(shape), Init("zeros"), **spec)
    return p


def optimizer_of(parameters, stage, bucket_elements=100, **groups):
    by_axes = {
        DATA_AXES: groups.pop("data", None) or solo(),
        EXPERT_DATA_AXES: groups.pop("expert", None) or solo(),
    }
    use = ParameterUse({0: [[p] for p in parameters]} if stage == 3 else {})
    return ZeroOptimizer(
        parameters,
        settings_of(stage, bucket_elements),
        DataGroups(by_axes, **groups),
        use,
    )


def settings_of(stage, bucket_elements=100):
    return ZeroSettings(
        default_groups(lambda g: torch.optim.SGD(g, lr=0.0)),
        STAGES[stage],
        bucket_elements=bucket_elements,
        persistence=0,
    )


def whole(optimizer, parameters):
    with optimizer.gathered(0):
        return [p.detach().clone() for p in parameters]


def gradient(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_tensor_parallel_copies_count_once_and_partial_gradients_are_summed(stage):
    # Ranks 0..3 = tp 2 x dp 2. `split` differs per tp rank, `copy` is the same on both, `partial` is a sum
    # over both.
    def main(rank, world):
        t, d = rank % 2, rank // 2
        tp, data = (
            world.group("tp", (2 * d, 2 * d + 1), rank),
            world.group("dp-cp", (t, t + 2), rank),
        )
        split, copy, partial = (
            parameter("split", (9, 3), splits=(Split("tp", 0),)),
            parameter("copy", (65,)),
            parameter("partial", (7,), partial_over=("tp",)),
        )
        optimizer = optimizer_of(
            [split, copy, partial], stage, data=data, tp=tp, model=tp
        )
        optimizer.begin_step()
        optimizer.arm()
        for p, seed in (
            (split, 10 * t + d),
            (copy, 20 + d),
            (partial, 30 + 10 * t + d),
        ):
            contribute(p, gradient(p.shape, seed))
        return optimizer.step(1.0, 0.0).grad_norm, [
            -p for p in whole(optimizer, (split, copy, partial))
        ]

    total = lambda shape, *seeds: gradient(shape, seeds[0]) + gradient(shape, seeds[1])
    splits = [total((9, 3), 0, 1), total((9, 3), 10, 11)]
    copy = total((65,), 20, 21)
    partial = total((7,), 30, 31) + total((7,), 40, 41)
    norm = torch.cat([t.flatten() for t in (*splits, copy, partial)]).norm().item()
    for rank, (got_norm, got) in enumerate(run_ranks(4, main)):
        assert got_norm == pytest.approx(norm, rel=1e-6)
        for a, b in zip(got, (splits[rank % 2], copy, partial)):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("tie_by_schedule", [True, False])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_tied_parameters_sum_over_their_stages_and_count_once(stage, tie_by_schedule):
    # Ranks 0..5 = dp 2 x pp 3; the first and the last stage hold the tied weight, in layouts that differ.
    def main(rank, world):
        d, stage_index = rank % 2, rank // 2
        data = world.group("dp-cp", (2 * stage_index, 2 * stage_index + 1), rank)
        model = world.group("tp-pp", (d, 2 + d, 4 + d), rank)
        tied = world.group("embd", (d, 4 + d) if stage_index != 1 else (rank,), rank)
        own = parameter(f"own{stage_index}", (70 + stage_index,))
        shared = parameter(
            "embedding", (10, 13), tied="embedding", tied_copy=stage_index == 2
        )
        parameters = [[shared, own], [own], [own, shared]][stage_index]
        optimizer = optimizer_of(parameters, stage, data=data, model=model, tied=tied)
        norm = None
        for _ in range(2):
            optimizer.begin_step()
            optimizer.arm(stage_index if stage < 3 else None)
            for p in reversed(parameters):
                contribute(p, gradient(p.shape, rank + 50 * (p is shared)))
            if tie_by_schedule and stage_index != 1:
                optimizer.reduce_tied(stage_index if stage < 3 else None)
            norm = optimizer.step(1.0, 0.0).grad_norm
        return norm, [-p / 2 for p in whole(optimizer, parameters)]

    own = [
        gradient((70 + s,), 2 * s) + gradient((70 + s,), 2 * s + 1) for s in range(3)
    ]
    shared = sum(gradient((10, 13), 50 + rank) for rank in (0, 1, 4, 5))
    norm = torch.cat([t.flatten() for t in (*own, shared)]).norm().item()
    for rank, (got_norm, got) in enumerate(run_ranks(6, main)):
        s = rank // 2
        assert got_norm == pytest.approx(norm, rel=1e-6)
        for a, b in zip(got, [[shared, own[0]], [own[1]], [own[2], shared]][s]):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_experts_are_reduced_over_their_own_axis(stage):
    # Ranks 0..3: data 4 = ep 2 x edp 2. Expert e lives on ranks e and e + 2.
    def main(rank, world):
        e = rank % 2
        data, edp = (
            world.group("dp-cp", range(4), rank),
            world.group("edp", (e, e + 2), rank),
        )
        dense, expert = (
            parameter("dense", (67,)),
            parameter(f"expert{e}", (5, 13), distinct_over=("ep",)),
        )
        optimizer = optimizer_of([dense, expert], stage, data=data, expert=edp)
        optimizer.begin_step()
        optimizer.arm()
        for p, seed in ((expert, 10 + rank), (dense, rank)):
            contribute(p, gradient(p.shape, seed))
        return optimizer.step(1.0, 0.0).grad_norm, [
            -p for p in whole(optimizer, (dense, expert))
        ]

    dense = sum(gradient((67,), rank) for rank in range(4))
    experts = [gradient((5, 13), 10 + e) + gradient((5, 13), 12 + e) for e in range(2)]
    norm = torch.cat([t.flatten() for t in (dense, *experts)]).norm().item()
    for rank, (got_norm, got) in enumerate(run_ranks(4, main)):
        assert got_norm == pytest.approx(norm, rel=1e-6)
        for a, b in zip(got, (dense, experts[rank % 2])):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    "stage, operation",
    [(0, "all_reduce"), (1, "reduce_scatter"), (2, "reduce_scatter")],
)
def test_buckets_start_in_order_as_soon_as_they_and_those_before_them_are_complete(
    stage, operation
):
    def main(rank, world):
        parameters = [
            parameter(name, (90,)) for name in ("first", "second", "third")
        ]  # one bucket each
        optimizer = optimizer_of(
            parameters,
            stage,
            bucket_elements=1,
            data=world.group("dp-cp", (0, 1), rank),
        )
        started = lambda: world.traffic[rank].calls[operation, "dp-cp", 2]
        optimizer.begin_step()
        seen = []
        accumulator_of(parameters[2]).ready()  # an earlier micro-batch
        seen.append(started())
        optimizer.arm()
        for i in (1, 2, 0):
            accumulator_of(parameters[i]).ready()
            seen.append(started())
        optimizer.step(1.0, 0.0)
        bytes_moved = world.traffic[rank].bytes[operation, "dp-cp", 2]
        return seen, bytes_moved

    norms = (
        24 if stage == 0 else 0
    )  # the norm's three float64 are also sent by all_reduce
    assert run_ranks(2, main) == [([0, 0, 2, 3], 3 * 128 * 4 + norms)] * 2


def test_a_tied_weight_that_waits_for_the_other_stage_holds_up_no_other_bucket():
    def main(rank, world):
        own, head = (
            parameter("own", (90,)),
            parameter("embedding", (90,), tied="embedding", tied_copy=True),
        )
        optimizer = optimizer_of(
            [own, head],
            1,
            bucket_elements=1,
            data=world.group("dp-cp", (0, 1), rank),
            tied=world.group("embd", (0, 1), rank),
        )
        started = lambda: world.traffic[rank].calls["reduce_scatter", "dp-cp", 2]
        optimizer.begin_step()
        optimizer.arm()
        seen = []
        for act in (
            accumulator_of(head).ready,
            accumulator_of(own).ready,
            optimizer.reduce_tied,
        ):
            act()
            seen.append(started())
        return seen

    assert run_ranks(2, main) == [[0, 1, 2]] * 2


def test_stages_of_one_rank_are_armed_and_tied_one_by_one():
    def main(rank, world):
        own = parameter("own", (3,))
        shared = parameter("shared", (3,), tied="shared", tied_copy=rank == 1)
        groups = DataGroups(
            {DATA_AXES: solo()},
            model=world.group("tp-pp", (0, 1), rank),
            tied=world.group("embd", (0, 1), rank),
        )
        optimizer = ZeroOptimizer(
            [own, shared],
            settings_of(1),
            groups,
            ParameterUse(stage_of={own: rank, shared: rank + 2}),
        )
        optimizer.begin_step()
        taken(shared).fill_(1.0)
        calls = lambda: world.traffic[rank].calls["all_reduce", "embd", 2]
        seen = []
        for stage_index in (rank, rank + 2, rank + 2):
            optimizer.reduce_tied(stage_index)
            seen.append(calls())
        optimizer.step(1.0, 0.0)
        return seen, calls(), shared.detach().tolist()

    assert run_ranks(2, main) == [([0, 1, 1], 1, [-2.0] * 3)] * 2


@pytest.mark.parametrize("order", ["ends first", "turns"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_two_stages_of_a_rank_share_is_reduced_once_with_all_that_both_contributed(
    stage, order
):
    """Stages 0 and 3 use `shared`, whose last contribution comes after either one's last backward; two
    micro-batches."""

    def main(rank, world):
        data = world.group("dp-cp", (0, 1), rank)
        shared, first, last = (
            parameter("shared", (10, 13)),
            parameter("first", (70,)),
            parameter("last", (5, 7)),
        )
        stage_of = {shared: SHARED, first: 0, last: 3}
        use = ParameterUse(
            {0: [[shared], [first]], 3: [[last], [shared]]} if stage == 3 else {},
            stage_of=stage_of,
        )
        optimizer = ZeroOptimizer(
            [shared, first, last],
            settings_of(stage),
            DataGroups({DATA_AXES: data}),
            use,
        )
        backwards = (
            [(3, 0), (0, 0), (3, 1), (0, 1)]
            if order == "turns"
            else [(0, 0), (0, 1), (3, 0), (3, 1)]
        )
        norms = []
        for _ in range(2):
            optimizer.begin_step()
            for index, k in backwards:
                if stage >= 2 or k == 1:
                    optimizer.arm(index)
                contribute(shared, gradient(shared.shape, 100 * index + 10 * k + rank))
                own = first if index == 0 else last
                contribute(own, gradient(own.shape, 1000 + 100 * index + 10 * k + rank))
            norms.append(optimizer.step(1.0, 0.0).grad_norm)
        weights = []
        for index, p in ((0, shared), (3, shared), (0, first), (3, last)):
            with optimizer.gathered(index):
                weights.append(-p.detach().clone() / 2)
        return norms, weights

    total = lambda shape, *seeds: sum(
        gradient(shape, seed + rank) for seed in seeds for rank in range(2)
    )
    shared = total((10, 13), 0, 10, 300, 310)
    first, last = total((70,), 1000, 1010), total((5, 7), 1300, 1310)
    norm = torch.cat([t.flatten() for t in (shared, first, last)]).norm().item()
    for norms, weights in run_ranks(2, main):
        assert norms == pytest.approx([norm, norm], rel=1e-6)
        for a, b in zip(weights, (shared, shared, first, last), strict=True):
            torch.testing.assert_close(a, b)
