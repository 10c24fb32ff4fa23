"""The order of computations of each schedule, against the papers' closed forms."""

import pytest

from megatron_ds.errors import ConfigError, ScheduleError
from megatron_ds.pipeline.instruction import Instruction, Op
from megatron_ds.pipeline.schedules import SCHEDULES
from megatron_ds.pipeline.simulate import simulate

SHAPES = [(p, m) for p in range(1, 8) for m in range(1, 11)]


def words(program):
    return " ".join(f"{i.op}{i.microbatch}" for i in program)


def test_gpipe_runs_all_forwards_then_all_backwards_in_the_same_order():
    schedule = SCHEDULES["gpipe"](2, 3)
    assert [words(program) for program in schedule] == ["F0 F1 F2 B0 B1 B2"] * 2
    assert {i.stage for i in schedule[1]} == {1}


def test_1f1b_warms_up_then_alternates_then_drains():
    assert [words(program) for program in SCHEDULES["1f1b"](3, 4)] == [
        "F0 F1 F2 B0 F3 B1 B2 B3", "F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"]


def test_1f1b_with_fewer_microbatches_than_stages_is_all_warm_up_on_the_early_ranks():
    assert [words(program) for program in SCHEDULES["1f1b"](4, 2)] == ["F0 F1 B0 B1"] * 3 + ["F0 B0 F1 B1"]


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_the_bubble_is_p_minus_1_over_m_plus_p_minus_1(name):
    for p, m in SHAPES:
        simulation = simulate(SCHEDULES[name](p, m))
        assert simulation.span == 3 * (m + p - 1)                          # F takes 1, B takes 2
        assert simulation.bubble == pytest.approx((p - 1) / (m + p - 1), abs=1e-12)


def test_peak_of_live_microbatches_is_m_for_gpipe_and_at_most_the_stages_behind_for_1f1b():
    for p, m in SHAPES:
        assert simulate(SCHEDULES["gpipe"](p, m)).peak_live == (m,) * p
        assert simulate(SCHEDULES["1f1b"](p, m)).peak_live == tuple(min(m, p - rank) for rank in range(p))


def test_1f1b_equals_the_greedy_rule_backward_before_forward_with_at_most_p_minus_rank_alive():
    for p, m in SHAPES:
        assert SCHEDULES["1f1b"](p, m) == greedy(p, m)


def greedy(p, m):
    """Time steps of one unit: each rank takes a backward if one is ready, else a forward if it may keep one more."""
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
            elif forwards < m and forwards - backwards < p - r and (r == 0 or done.get(before, now + 1) <= now):
                op, k, cost = Op.F, forwards, 1
            else:
                continue
            schedule[r].append(Instruction(op, r, k))
            free_at[r] = done[str(op), r, k] = now + cost
        now += 1
    return tuple(map(tuple, schedule))


def test_the_long_name_of_1f1b_finds_it_too_and_an_unknown_one_is_refused_with_the_known():
    assert SCHEDULES["one_f_one_b"] is SCHEDULES["1f1b"]
    with pytest.raises(ConfigError, match="'gpip'; did you mean 'gpipe'.*Known: 1f1b, gpipe, interleaved, zb-h1, zb-h2, zb-v"):
        SCHEDULES["gpip"]


@pytest.mark.parametrize("shape, message", [
    ((0, 1), "0 pipeline ranks.*1 or more"),
    ((2, 0), "0 micro-batches.*any number from 1 up"),
    ((2, 4, 3), "3 chunks.*Legal: 1")])
def test_an_impossible_shape_is_refused_with_the_legal_ones(shape, message):
    for name in ("gpipe", "1f1b"):
        with pytest.raises(ScheduleError, match=message):
            SCHEDULES[name](*shape)
