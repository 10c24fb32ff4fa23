"""The order of computations of each schedule, against the papers' closed forms."""

import os
from itertools import accumulate
from random import Random

import pytest

from megatron_ds.errors import ConfigError, ScheduleError
from megatron_ds.pipeline.instruction import Instruction, Op, StageCosts
from megatron_ds.pipeline.passes import add_transfers, lower
from megatron_ds.pipeline.schedules import SCHEDULES
from megatron_ds.pipeline.simulate import check, simulate
from tests.harness.bubble_rate import rank_bubble

pytestmark = [pytest.mark.plan, pytest.mark.one_in(2)]

WHOLE = [
    (p, m) for p in range(1, 17) for m in range(1, 65)
]  # with `make test-all`, about a minute
SAMPLE = [(p, m) for p in range(1, 8) for m in range(1, 11)] + [
    (8, 33),
    (11, 50),
    (16, 7),
    (16, 16),
    (16, 64),
]
SHAPES = WHOLE if os.environ.get("MEGATRON_DS_TEST_ALL") else SAMPLE
THIN = [
    (p, m, v)
    for p, m in WHOLE
    for v in (2, 3, 4)
    if m >= p
    and (
        SHAPES is WHOLE
        or p in (1, 2, 3, 5, 8, 16)
        and m in (1, 2, 3, 5, 8, 13, 16, 17, 23, 31, 64)
    )
]


def words(program):
    return " ".join(f"{i.op}{i.microbatch}" for i in program)


def test_gpipe_runs_all_forwards_then_all_backwards_in_the_same_order():
    schedule = SCHEDULES["gpipe"](2, 3)
    assert [words(program) for program in schedule] == ["F0 F1 F2 B0 B1 B2"] * 2
    assert {i.stage for i in schedule[1]} == {1}


def test_1f1b_warms_up_then_alternates_then_drains():
    assert [words(program) for program in SCHEDULES["1f1b"](3, 4)] == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]


def test_1f1b_with_fewer_microbatches_than_stages_is_all_warm_up_on_the_early_ranks():
    assert [words(program) for program in SCHEDULES["1f1b"](4, 2)] == [
        "F0 F1 B0 B1"
    ] * 3 + ["F0 B0 F1 B1"]


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_the_bubble_is_p_minus_1_over_m_plus_p_minus_1(name):
    for p, m in SHAPES:
        simulation = simulate(SCHEDULES[name](p, m))
        assert simulation.span == 3 * (m + p - 1)  # F takes 1, B takes 2
        assert simulation.bubble == pytest.approx((p - 1) / (m + p - 1), abs=1e-12)


def test_peak_of_live_microbatches_is_m_for_gpipe_and_at_most_the_stages_behind_for_1f1b():
    for p, m in SHAPES:
        assert simulate(SCHEDULES["gpipe"](p, m)).peak_live == (m,) * p
        assert simulate(SCHEDULES["1f1b"](p, m)).peak_live == tuple(
            min(m, p - rank) for rank in range(p)
        )


def test_1f1b_equals_the_greedy_rule_backward_before_forward_with_at_most_p_minus_rank_alive():
    for p, m in SHAPES:
        assert SCHEDULES["1f1b"](p, m) == greedy(p, m)


def greedy(p, m):
    """Time steps of one unit: each rank takes a backward if one is ready, else a forward if it may keep one
    more."""
    done, schedule = {}, [[] for _ in range(p)]
    free_at, now = [0] * p, 0
    while any(len(program) < 2 * m for program in schedule):
        for r in range(p):
            if free_at[r] > now:
                continue
            forwards = sum(i.op is Op.F for i in schedule[r])
            backwards = len(schedule[r]) - forwards
            behind = ("B", r + 1, backwards) if r < p - 1 else ("F", r, backwards)
            before = ("F", r - 1, forwards)
            if backwards < forwards and done.get(behind, now + 1) <= now:
                op, k, cost = Op.B, backwards, 2
            elif (
                forwards < m
                and forwards - backwards < p - r
                and (r == 0 or done.get(before, now + 1) <= now)
            ):
                op, k, cost = Op.F, forwards, 1
            else:
                continue
            schedule[r].append(Instruction(op, r, k))
            free_at[r] = done[str(op), r, k] = now + cost
        now += 1
    return tuple(map(tuple, schedule))


def test_the_long_name_of_1f1b_finds_it_too_and_an_unknown_one_is_refused_with_the_known():
    assert SCHEDULES["one_f_one_b"] is SCHEDULES["1f1b"]
    with pytest.raises(
        ConfigError,
        match="'gpip'; did you mean 'gpipe'.*Known: 1f1b, gpipe, interleaved, zb-auto",
    ):
        SCHEDULES["gpip"]


@pytest.mark.parametrize(
    "shape, message",
    [
        ((0, 1), "0 pipeline ranks.*1 or more"),
        ((2, 0), "0 micro-batches.*any number from 1 up"),
        ((2, 4, 3), "3 chunks.*Valid: 1. Schedules for 3 chunks: interleaved"),
        ((2, 4, 0), "0 chunks.*Valid: 1. Schedules for 0 chunks: none, use 1 or more"),
    ],
)
def test_an_impossible_shape_is_refused_with_the_legal_ones(shape, message):
    for name in ("gpipe", "1f1b"):
        with pytest.raises(ScheduleError, match=message):
            SCHEDULES[name](*shape)


def test_zb_v_lists_who_serves_the_chunks_that_it_does_not():
    with pytest.raises(
        ScheduleError,
        match="1 chunks.*Valid: 2. Schedules for 1 chunks: gpipe, interleaved",
    ):
        SCHEDULES["zb-v"](4, 8, 1)
    with pytest.raises(
        ScheduleError,
        match="'interleaved' does not support 0 chunks.*Valid: any number from 1 up",
    ):
        SCHEDULES["interleaved"](4, 8, 0)


def test_interleaved_with_one_chunk_is_1f1b():
    for p, m in SHAPES:
        assert SCHEDULES["interleaved"](p, m, 1) == SCHEDULES["1f1b"](p, m)


def test_interleaved_takes_the_papers_order_where_the_microbatches_are_a_multiple_of_the_ranks():
    # Narayanan et al. 2021, figure 4, bottom: 4 ranks, 8 micro-batches, 2 chunks; first rank.
    program = SCHEDULES["interleaved"](4, 8, 2)[0]
    assert words(
        i._replace(microbatch=f"{i.microbatch}{'ab'[i.stage // 4]}") for i in program
    ) == (
        "F0a F1a F2a F3a F0b F1b F2b F3b F4a F5a F6a B0b F7a B1b F4b B2b F5b B3b F6b B0a F7b B1a B2a B3a "
        "B4b B5b B6b B7b B4a B5a B6a B7a"
    )


@pytest.mark.parametrize("p, m, v", THIN)
def test_interleaved_has_the_bubble_of_the_paper_for_any_number_of_microbatches_from_p_up(
    p, m, v
):
    simulation = simulate(SCHEDULES["interleaved"](p, m, v))
    assert simulation.span == 3 * (v * m + p - 1)
    assert simulation.bubble == pytest.approx((p - 1) / (v * m + p - 1), abs=1e-12)


@pytest.mark.parametrize(
    "p, m, v, size",
    [
        (2, 7, 2, 3),
        (3, 16, 3, 4),
        (4, 8, 2, 5),
        (4, 21, 4, 6),
        (8, 40, 2, 9),
        (5, 3, 2, 7),
    ],
)
def test_larger_groups_of_interleaved_cost_memory_and_no_time(p, m, v, size):
    order = SCHEDULES["interleaved"](p, m, v, group_size=size)
    simulation, longest = (
        check(lower(order, p * v), p * v, m),
        -(-m // max(1, m // size)),
    )
    assert m < p or simulation.span == 3 * (v * m + p - 1)
    assert simulation.peak_live[0] == min(v * m, 2 * (p - 1) + (v - 1) * longest + 1)
    assert [i.microbatch for i in order[0][: longest + 1]] == [*range(longest), 0]


def test_interleaved_refuses_groups_in_which_a_rank_would_wait():
    with pytest.raises(
        ScheduleError,
        match="groups of 3 micro-batches on 4 pipeline ranks.*Use 4 or more",
    ):
        SCHEDULES["interleaved"](4, 8, 2, group_size=3)


def test_zb_h1_has_a_third_of_the_bubble_with_the_peak_of_1f1b_and_zb_h2_none_within_a_rank():
    for p, m in SHAPES:
        h1, h2 = (simulate(SCHEDULES[name](p, m)) for name in ("zb-h1", "zb-h2"))
        assert max(h1.peak_live) == max(simulate(SCHEDULES["1f1b"](p, m)).peak_live)
        if m >= p:
            assert h1.span == h2.span == 3 * m + p - 1  # 1F1B: 3 (m + p - 1)
        if m >= 2 * p - 1:
            assert set(h2.rank_spans) == {3 * m} and rank_bubble(h2) == 0


@pytest.mark.parametrize("f, i, w", [(1, 1, 1), (2, 3, 1), (5, 4, 4), (3, 3, 2)])
def test_zb_h1_and_zb_h2_have_the_bubbles_of_the_paper_for_unequal_costs(f, i, w):
    # Qi et al. 2024, table 2: (p - 1) (F + I - W) and (p - 1) (F + I - 2 W), if neither F nor I + W is the
    # longer
    for p in (2, 3, 5, 8):
        m = 4 * p
        for name, idle in (("zb-h1", f + i - w), ("zb-h2", max(f + i - 2 * w, 0))):
            spans = simulate(SCHEDULES[name](p, m), StageCosts(f, i, w).of).rank_spans
            assert max(spans) == m * (f + i + w) + (p - 1) * idle


def test_zb_v_is_shorter_than_zb_h1_with_the_same_memory():
    for p in range(2, 17):
        for m in (p, 2 * p, 3 * p, 4 * p):
            half = StageCosts(0.5, 0.5, 0.5)  # two stages a rank, each half of the work
            v, h1 = (
                simulate(SCHEDULES["zb-v"](p, m), half.of),
                simulate(SCHEDULES["zb-h1"](p, m)),
            )
            assert max(v.peak_live) == 2 * p == 2 * max(h1.peak_live)
            assert (
                3 * m + (p - 1) / 2 <= v.span <= 3 * m + (p - 1) / 2 + 3
                and v.span < h1.span
            )


def test_zb_v_for_unequal_costs_waits_less_than_its_order_for_equal_ones_within_the_same_memory():
    # Most work of a rank, and how much longer the step takes. Without looking at the costs: 1.40, 1.23, 1.04,
    # 1.26.
    for costs, most in (
        ((1, 1.5, 0.5), 1.10),
        ((1, 1.2, 0.7), 1.12),
        (((1,) * 15 + (2,),) * 3, 1.001),
        ((9.26, 9.04, 4.67, 0.6), 1.23),
    ):
        of = StageCosts(*costs)
        plain, found = (
            simulate(add_transfers(order, 16), of.of)
            for order in (SCHEDULES["zb-v"](8, 24), SCHEDULES["zb-v"](8, 24, costs=of))
        )
        assert (
            max(found.rank_spans)
            <= most * max(found.busy)
            < max(plain.rank_spans) - 0.02 * max(found.busy)
        )
        assert max(found.peak_live) <= 16


@pytest.mark.parametrize("seed", range(20))
def test_zb_v_is_legal_for_any_costs_and_no_longer_than_its_order_for_equal_ones(seed):
    random = Random(seed)
    p, m = random.randint(1, 8), random.randint(1, 24)
    of = lambda low, high: tuple(random.uniform(low, high) for _ in range(2 * p))
    costs = StageCosts(of(0.5, 2), of(0.5, 3), of(0, 2), random.choice([0, 0.01, 0.3]))
    longest = lambda order: max(
        simulate(add_transfers(order, 2 * p), costs.of).rank_spans
    )
    order = SCHEDULES["zb-v"](p, m, costs=costs)
    assert max(check(lower(order, 2 * p), 2 * p, m).peak_live) <= 2 * p
    assert longest(order) <= longest(SCHEDULES["zb-v"](p, m)) + 1e-9


def random_costs(seed):
    random = Random(seed)
    p = random.randint(1, 8)
    stages = lambda low, high: tuple(random.uniform(low, high) for _ in range(p))
    return (
        p,
        random.randint(1, 24),
        StageCosts(
            stages(0.5, 2),
            stages(0.5, 2),
            stages(0.2, 2),
            random.choice([0, 0.01, 0.3]),
        ),
    )


def peak_alive(program, share):
    """The peak of live activations, of which W needs a share."""
    changes = {Op.F: 1, Op.I: share - 1, Op.W: -share}
    return max(accumulate(changes[i.op] for i in program))


@pytest.mark.parametrize("seed", range(40 if SHAPES is WHOLE else 12))
def test_the_automatic_schedule_keeps_its_limit_and_is_no_longer_than_the_handmade_ones_that_fit(
    seed,
):
    p, m, costs = random_costs(seed)
    longest = lambda order: max(simulate(add_transfers(order, p), costs.of).rank_spans)
    for limit, share in ((1, 1.0), (p, 1.0), (p, 0.3), (2 * p, 0.4), (p + 0.5, 0.5)):
        order = SCHEDULES["zb-auto"](
            p, m, costs=costs, memory_limit=limit, weight_share=share
        )
        assert max(peak_alive(program, share) for program in order) <= limit + 1e-6
        check(lower(order, p), p, m)
        for name, needed in (("zb-h1", min(m, p)), ("zb-h2", min(m, 2 * p - 1))):
            assert (
                needed > limit
                or longest(order) <= longest(SCHEDULES[name](p, m)) + 1e-9
            )


def test_more_memory_makes_the_automatic_schedule_shorter():
    bubbles = [
        rank_bubble(simulate(SCHEDULES["zb-auto"](8, 32, memory_limit=limit)))
        for limit in (2, 4, 8, 12, 16)
    ]
    assert (
        bubbles == sorted(bubbles, reverse=True)
        and bubbles[0] > 0.5 > 0.08 > bubbles[2] > bubbles[4] == 0
    )


@pytest.mark.parametrize(
    "options",
    [{"memory_limit": 0.5}, {"memory_limit": float("nan")}, {"weight_share": 1.1}],
)
def test_the_automatic_schedule_refuses_limits_in_which_nothing_passes(options):
    with pytest.raises(
        ScheduleError, match="Use a memory limit of 1 or more.*and a share from 0 to 1"
    ):
        SCHEDULES["zb-auto"](4, 8, **options)
