"""ZeRO 3 with weights over an inner group: the update of stage 0, gathers inside, and the same order on every
communicator."""

import pytest
import torch
from torch import nn

from megatron_ds.mpu.group import Group, solo
from megatron_ds.mpu.param_spec import DATA_AXES, Init, ParamSpec
from megatron_ds.optim import default_groups
from megatron_ds.zero.data_groups import DataGroups, Hierarchy, shard_of
from megatron_ds.zero.exchange import BucketGradient, FullPrecisionExchange
from megatron_ds.zero.layout import plan_layout
from megatron_ds.zero.optimizer import ZeroOptimizer
from megatron_ds.zero.prediction import ElementBytes, predict_sets
from megatron_ds.zero.set_plan import Fact, ParameterUse, plan_sets
from megatron_ds.zero.settings import HIERARCHICAL, STAGES, ZeroSettings
from tests.harness.gradients import contribute
from tests.harness.threads import run_ranks

pytestmark = pytest.mark.threads

SIZES = (7, 1300, 65, 513, 2)


def data_groups(world, rank, n, h):
    """The data group, and, where 1 < h, its inner and outer groups."""
    data = world.group("dp-cp", range(n), rank)
    if h == 1:
        return DataGroups({DATA_AXES: data})
    o, i = divmod(rank, h)
    inner = (
        data if h == n else world.group("dp-cp-inner", range(o * h, (o + 1) * h), rank)
    )
    outer = (
        solo("dp-cp-outer", rank)
        if h == n
        else world.group("dp-cp-outer", range(i, n, h), rank)
    )
    return DataGroups({DATA_AXES: data}, inner=inner, outer=outer)


def make_optimizer(groups, policy, dtype=torch.float32, bucket_elements=500, **options):
    parameters = []
    for i, size in enumerate(SIZES):
        p = nn.Parameter(
            torch.randn(size, generator=torch.Generator().manual_seed(i)).to(dtype)
        )
        p.spec = ParamSpec(f"p{i}", (size,), Init("normal", 1.0))
        parameters.append(p)
    settings = ZeroSettings(
        default_groups(lambda g: torch.optim.AdamW(g, fused=True)),
        policy,
        clip_grad=1.0,
        # the last parameter is small
        bucket_elements=bucket_elements,
        persistence=5,
        **options,
    )
    return (
        parameters,
        ZeroOptimizer(
            parameters,
            settings,
            groups,
            ParameterUse({0: [parameters[:2], parameters[2:]]}),
        ),
    )


def train(
    rank,
    world,
    n,
    h,
    policy,
    dtype=torch.float32,
    microbatches=2,
    left_out=(),
    **options,
):
    """Norms and final parameters. left_out: (rank, parameter) that contribute nothing."""
    groups = data_groups(world, rank, n, h)
    parameters, optimizer = make_optimizer(groups, policy, dtype, **options)
    norms = []
    for step in range(3):
        optimizer.begin_step()
        for k in range(microbatches):
            if policy.gradient or k == microbatches - 1:
                optimizer.arm()
            for i, p in reversed(list(enumerate(parameters))):
                if (rank, i) not in left_out:
                    g = torch.randn(
                        p.shape,
                        generator=torch.Generator().manual_seed(
                            1000 * step + 100 * rank + 10 * k + i
                        ),
                    )
                    contribute(p, g)
        norms.append(optimizer.step(0.01, 0.1).grad_norm)
    with optimizer.gathered(0):
        return norms, [p.detach().clone() for p in parameters]


def run(n, h, policy, *args, **options):
    return run_ranks(
        n, lambda rank, world: train(rank, world, n, h, policy, *args, **options)
    )


@pytest.mark.parametrize("n, h", [(4, 2), (6, 3), (6, 2), (4, 4)])
def test_shards_of_an_outer_group_are_in_order_the_part_of_its_inner_rank(n, h):
    layout = plan_layout([("a", 7000), ("b", 130)], 3000, n)
    hierarchies = []
    for rank in range(n):
        o, i = divmod(rank, h)
        group = lambda ranks: Group("", tuple(ranks), tuple(ranks).index(rank))  # noqa: B023
        hierarchies.append(
            Hierarchy(
                group(range(n)), group(range(o * h, o * h + h)), group(range(i, n, h))
            )
        )
    assert sorted(where.shard for where in hierarchies) == list(range(n))
    for where in hierarchies:
        parts = layout.shard_pieces(where.inner.rank, h)
        owners = [
            layout.shard_pieces(shard_of(rank, n, h)) for rank in where.outer.ranks
        ]
        for part, *shards in zip(parts, *owners):
            assert [s.start for s in shards] + [part.stop] == [part.start] + [
                s.stop for s in shards
            ]


@pytest.mark.parametrize("n, h", [(4, 2), (6, 3), (6, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_hops_give_the_update_of_stage_0(n, h, dtype):
    for (norms, got), (expected_norms, expected) in zip(
        run(n, h, HIERARCHICAL, dtype), run(n, 1, STAGES[0], dtype)
    ):
        # sums within inner groups first, then over them
        assert norms == pytest.approx(expected_norms, rel=2e-6)
        for a, b in zip(got, expected):
            torch.testing.assert_close(
                a, b, rtol=1e-5 if dtype == torch.float32 else 2**-7, atol=1e-6
            )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_inner_group_is_stage_3_to_the_bit(dtype):
    for (norms, got), (expected_norms, expected) in zip(
        run(4, 4, HIERARCHICAL, dtype), run(4, 1, STAGES[3], dtype)
    ):
        assert norms == expected_norms
        assert all(torch.equal(a, b) for a, b in zip(got, expected))


def test_the_bucket_size_changes_no_bit_of_the_gradients():
    """The norm sees another order."""
    runs = [
        run(
            4,
            2,
            HIERARCHICAL,
            bucket_elements=size,
            sent_dtype=torch.float16,
            sent_divisor=None,
        )[0]
        for size in (1, 500, 10_000)
    ]
    for norms, parameters in runs[1:]:
        assert norms == pytest.approx(runs[0][0], rel=1e-6)
        for a, b in zip(parameters, runs[0][1]):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_bytes_held_and_sent_are_those_of_the_closed_forms():
    """Weights 2Ψ/h, the rest over n; between inner groups travels one h-th."""
    n, h, m = 6, 3, 2

    def main(rank, world):
        parameters, optimizer = make_optimizer(
            data_groups(world, rank, n, h),
            HIERARCHICAL,
            torch.bfloat16,
            grad_dtype=torch.bfloat16,
        )
        held, traffic = optimizer.memory(), world.traffic[rank]
        optimizer.begin_step()
        optimizer.keep_gathered(0)
        for _ in range(m):
            optimizer.arm()
            for p in reversed(parameters):
                contribute(p, 1.0)
        optimizer.release_gathered(0)
        optimizer.step(0.01, 0.1)
        numels = {bool(s.plan.units): s.plan.layout.numel for s in optimizer.sets}
        sent = {(op, axes): count for (op, axes, _), count in traffic.bytes.items()}
        return held, numels, sent, optimizer.traffic(m, True, True)

    facts = [
        Fact(f"p{i}", size, "bf16", stage=0, layer=int(i >= 2))
        for i, size in enumerate(SIZES)
    ]
    settings = ZeroSettings((), HIERARCHICAL, bucket_elements=500, persistence=5)
    plans = plan_sets(facts, settings, {DATA_AXES: n}, inner_shards=h)
    for rank, (held, numels, sent, planned) in enumerate(run_ranks(n, main)):
        assert held == predict_sets(plans, {DATA_AXES: rank}, ElementBytes(2, 2))
        psi, small = (
            numels[True],
            numels[False],
        )  # elements gathered by layer, and always whole
        assert (
            held.parameters == 2 * psi // h + 2 * small
            and held.gradients == 2 * (psi + small) // n
        )
        del sent["all_reduce", "dp-cp"]  # the norm's
        assert (
            sent
            == planned
            == {
                ("reduce_scatter", "dp-cp-inner"): 2 * m * (psi + small),
                ("reduce_scatter", "dp-cp-outer"): 2 * m * (psi + small) // h,
                ("all_gather", "dp-cp-inner"): 2 * psi + 2 * small,
                ("all_gather", "dp-cp-outer"): 2 * (psi + small) // h,
            }
        )


def test_all_ranks_of_a_communicator_see_the_same_collectives_in_the_same_order():
    """Also where ranks receive gradients for different parameters, which the step then tells by name."""
    n, h = 4, 2
    seen = {}

    def main(rank, world):
        seen[rank] = []
        add = world.traffic[rank].add
        world.traffic[rank].add = lambda operation, axes, size, count, *calls: (
            seen[rank].append((axes, operation, count)),
            add(operation, axes, size, count, *calls),
        )
        try:
            train(
                rank,
                world,
                n,
                h,
                HIERARCHICAL,
                microbatches=3,
                left_out={(1, 3), (2, 0), (2, 1)},
            )
        except Exception as error:
            return str(error)

    told = run_ranks(n, main)
    assert (
        all(text and "p3" in text or "p0" in text for text in told)
        and len(set(told)) == 1
    )
    for axes in ("dp-cp", "dp-cp-inner", "dp-cp-outer"):
        orders = [
            [entry for entry in seen[rank] if entry[0] == axes] for rank in range(n)
        ]
        assert orders[0] and all(order == orders[0] for order in orders)
    assert seen[0] == seen[1] == seen[2] == seen[3]  # and between communicators too


@pytest.mark.parametrize("following", ["two hops", "one hop", "one rank"])
def test_the_wait_for_all_buckets_but_the_last_begins_no_collective(following):
    """How long a rank's buffers are read by others decides when it waits, so a wait may not communicate."""

    def reduce_two(rank, world):
        groups = data_groups(world, rank, 4, 2)
        both = groups.ranks_of(DATA_AXES)
        hierarchies = {
            "two hops": Hierarchy(both.data, groups.inner, groups.outer),
            "one hop": Hierarchy.flat(
                world.group("edp", ((0, 2), (1, 3))[rank % 2], rank)
            ),
            "one rank": Hierarchy.flat(solo("edp", rank)),
        }
        exchange = FullPrecisionExchange(torch.float32, torch.device("cpu"))
        out = torch.empty(2)
        whole = torch.arange(8.0) + rank
        of_all = BucketGradient("a", whole, out, 0, False, hierarchies["two hops"])
        first = exchange.reduce(of_all)
        ranks = hierarchies[following]
        other = torch.ones(8)
        shard = other if ranks.data.size == 1 else torch.empty(8 // ranks.data.size)
        exchange.reduce(BucketGradient("b", other, shard, 0, False, ranks))
        before = dict(world.traffic[rank].calls)
        first.wait()
        begun = before == dict(world.traffic[rank].calls)
        exchange.finish()
        return begun, out, hierarchies["two hops"].shard

    for begun, out, shard in run_ranks(4, reduce_two):
        assert begun
        total = torch.arange(8.0) * 4 + 6
        assert torch.equal(out, total[2 * shard : 2 * shard + 2])
