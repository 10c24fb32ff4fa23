"""Passes: what they add, where, and that the result runs on any legal transport."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ds.errors import ScheduleError
from megatron_ds.pipeline.instruction import COMPUTE, Instruction, Op, stage_ranks
from megatron_ds.pipeline.passes import (
    add_ties,
    add_transfers,
    add_zero,
    forward_only,
    lower,
)
from megatron_ds.pipeline.schedules import SCHEDULES
from megatron_ds.pipeline.simulate import check, simulate

pytestmark = pytest.mark.plan


def words(program):
    return " ".join(map(str, program))


def bare(schedule):
    return tuple(tuple(i for i in program if i.op in COMPUTE) for program in schedule)


def test_receives_are_posted_one_computation_ahead_and_sends_follow_their_computation():
    lowered = add_transfers(SCHEDULES["1f1b"](2, 2), 2)
    assert words(lowered[0]) == "F0@0 SA0@0 RG0@0 F1@0 SA1@0 RG1@0 B0@0 B1@0"
    assert words(lowered[1]) == "RA0@1 F0@1 RA1@1 B0@1 SG0@1 F1@1 B1@1 SG1@1"


def test_a_receive_follows_the_sends_when_the_message_before_it_is_not_consumed_yet():
    """Gradient 1 is posted before B0, which waits for gradient 0, and after activation 3, on which it depends."""
    lowered = add_transfers(SCHEDULES["gpipe"](2, 4), 2)
    assert words(lowered[0]) == (
        "F0@0 SA0@0 F1@0 SA1@0 F2@0 SA2@0 RG0@0 F3@0 SA3@0 "
        "RG1@0 B0@0 RG2@0 B1@0 RG3@0 B2@0 B3@0"
    )


def test_lowering_adds_but_never_reorders():
    for name in SCHEDULES:
        for p, m in ((1, 2), (2, 1), (3, 5), (5, 3)):
            schedule = SCHEDULES[name](p, m)
            stages = p * SCHEDULES[name].default_chunks
            assert bare(add_transfers(schedule, stages)) == schedule


def test_posted_one_ahead_a_transfer_runs_behind_a_computation_posted_late_the_rank_waits_for_it():
    # A message travels once its receive is posted, here for as long as a forward takes.
    cost = lambda i: {Op.F: 1, Op.B: 2, Op.SEND_ACT: 1}.get(i.op, 0)
    first, second = add_transfers(SCHEDULES["gpipe"](2, 6), 2)
    late = tuple(
        instruction
        for i in second
        if i.op is not Op.RECV_ACT
        for instruction in (
            *([i._replace(op=Op.RECV_ACT)] if i.op is Op.F else []),
            i,
        )
    )
    for program, forward_and_wait in ((second, 1), (late, 2)):
        simulation = simulate((first, program), cost)
        start = dict(zip(map(str, program), simulation.starts[1]))
        assert start["F5@1"] - start["F1@1"] == 4 * forward_and_wait


def test_at_most_two_receives_wait_on_a_rank_that_looks_one_computation_ahead():
    for p, m in ((2, 5), (4, 9), (7, 3)):
        assert max(check(lower(SCHEDULES["1f1b"](p, m), p), p, m).peak_receives) <= 2


def test_one_stage_has_nothing_to_transfer():
    schedule = SCHEDULES["1f1b"](1, 3)
    assert add_transfers(schedule, 1) == schedule


def random_schedule(data):
    """Any placement of stages on ranks, and any order that respects the dependencies."""
    num_stages, m = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4))
    ranks = data.draw(st.integers(1, num_stages))
    home = [
        *range(ranks),
        *(data.draw(st.integers(0, ranks - 1)) for _ in range(num_stages - ranks)),
    ]
    split = data.draw(st.booleans())
    open_, done, programs = (
        {(Op.F, 0, k) for k in range(m)},
        set(),
        [[] for _ in range(ranks)],
    )
    while open_:
        op, s, k = data.draw(st.sampled_from(sorted(open_)))
        open_.remove((op, s, k))
        done.add((op, s, k))
        programs[home[s]].append(Instruction(op, s, k))
        backward = Op.I if split else Op.B
        if op is Op.F:
            open_.add((Op.F, s + 1, k) if s + 1 < num_stages else (backward, s, k))
        elif op is backward:
            open_ |= {(backward, s - 1, k)} if s else set()
            open_ |= {(Op.W, s, k)} if split else set()
    return tuple(map(tuple, programs)), num_stages, m


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_legal_order_on_any_placement_is_lowered_to_channels_that_keep_their_order(
    data,
):
    schedule, num_stages, m = random_schedule(data)
    lowered = lower(schedule, num_stages, tied={0, num_stages - 1})
    # `check` raises where messages would be mixed up, or where streams that share a queue would deadlock.
    check(lowered, num_stages, m)
    check(forward_only(lowered), num_stages, m, forward_only=True)
    assert bare(lowered) == schedule
    assert simulate(lowered).span == simulate(schedule).span


def test_receives_of_a_channel_follow_the_order_of_its_sends_even_where_they_are_used_in_another():
    f = lambda s, k: Instruction(Op.F, s, k)
    lowered = add_transfers(((f(0, 0), f(0, 1)), (f(1, 1), f(1, 0))), 2)
    assert words(lowered[1]) == "RA0@1 RA1@1 F1@1 F0@1"


def test_ties_come_last_on_each_holder_even_after_the_sends():
    lowered = add_transfers(add_ties(SCHEDULES["1f1b"](3, 2), (0, 2)), 3)
    assert [program[-1] for program in lowered] == [
        Instruction(Op.TIE, 0),
        Instruction(Op.SEND_GRAD, 1, 1),
        Instruction(Op.TIE, 2),
    ]
    assert lowered == add_ties(add_transfers(SCHEDULES["1f1b"](3, 2), 3), (2, 0, 2))


def test_a_tie_right_after_the_backward_of_a_chunk_would_wait_forever_so_ties_wait_for_the_whole_rank():
    f, b = (lambda s, k=0, op=op: Instruction(op, s, k) for op in (Op.F, Op.B))
    schedule = (
        (f(0), f(2), b(2), b(0)),
        (f(1), f(3), b(3), b(1)),
    )  # two chunks per rank, one micro-batch
    check(lower(schedule, 4, tied=(0, 3)), 4, 1)
    lowered = add_transfers(schedule, 4)
    tie = (Instruction(Op.TIE, 0), Instruction(Op.TIE, 3))
    after = lowered[1].index(Instruction(Op.SEND_GRAD, 3, 0)) + 1
    eager = (lowered[0] + tie[:1], lowered[1][:after] + tie[1:] + lowered[1][after:])
    with pytest.raises(ScheduleError, match="deadlock.*TIE@3"):
        simulate(eager)


def test_reduce_announces_the_last_backward_of_each_stage():
    assert words(add_zero(SCHEDULES["1f1b"](2, 2))[0]) == "F0@0 F1@0 B0@0 REDUCE@0 B1@0"
    assert (
        words(add_zero(SCHEDULES["1f1b"](2, 2), reduce_each=True)[1])
        == "F0@1 REDUCE@1 B0@1 F1@1 REDUCE@1 B1@1"
    )


def test_a_stage_kept_gathered_is_gathered_before_its_first_computation_and_released_after_its_last():
    lowered = lower(
        SCHEDULES["1f1b"](2, 2), 2, tied=(0, 1), gather=True, reduce_each=True
    )
    assert words(lowered[1]) == (
        "RA0@1 GATHER@1 F0@1 RA1@1 REDUCE@1 B0@1 SG0@1 F1@1 REDUCE@1 B1@1 RELEASE@1 "
        "SG1@1 TIE@1"
    )
    check(lowered, 2, 2)
    assert words(forward_only(lowered)[0]) == "GATHER@0 F0@0 SA0@0 F1@0 RELEASE@0 SA1@0"


def test_where_backward_is_split_reduce_announces_the_last_weight_half_and_weights_follow_all_input_halves():
    program = tuple(
        Instruction(op, 0, k)
        for op, k in ((Op.F, 0), (Op.F, 1), (Op.I, 0), (Op.I, 1), (Op.W, 0), (Op.W, 1))
    )
    assert words(add_zero((program,))[0]) == "F0@0 F1@0 I0@0 I1@0 W0@0 REDUCE@0 W1@0"
    assert (
        words(add_zero((program,), gather=True)[0])
        == "GATHER@0 F0@0 F1@0 I0@0 I1@0 RELEASE@0 W0@0 REDUCE@0 W1@0"
    )


def test_forward_only_of_a_lowered_schedule_keeps_the_forwards_and_stays_legal():
    for name in SCHEDULES:
        for p, m in ((1, 1), (2, 3), (4, 6)):
            schedule, stages = SCHEDULES[name](p, m), p * SCHEDULES[name].default_chunks
            lowered = forward_only(lower(schedule, stages, tied=(0, stages - 1)))
            assert bare(lowered) == forward_only(schedule)
            check(lowered, stages, m, forward_only=True)


@pytest.mark.parametrize(
    "broken, message",
    [
        (
            lambda s: add_transfers(s, 3),
            r"stages \[0, 1\], not the 3 stages.*num_stages=2",
        ),
        (
            lambda s: add_transfers((s[0], s[1][1:]), 2),
            r"B0@1, and waits for F0@1 \(in no program\)",
        ),
        (
            lambda s: add_transfers((s[0][:3], ()), 2),
            r"stages \[0\], not the 2 stages",
        ),
        (
            lambda s: add_transfers(forward_only((s[0], s[1][2:])), 2),
            "RA0@1 arrives on a rank that never computes F",
        ),
        (lambda s: add_ties(s, (0, 5)), r"stage 5 .*Stages with a backward: \[0, 1\]"),
        (lambda s: add_ties(forward_only(s), (0,)), "none .forward only"),
        (
            lambda s: stage_ranks((s[0], (s[1][0]._replace(stage=0),))),
            "F0@0 is on pipeline rank 1, but stage 0 is on rank 0",
        ),
    ],
)
def test_a_pass_refuses_what_it_cannot_complete_and_says_what_would_do(broken, message):
    with pytest.raises(ScheduleError, match=message):
        broken(SCHEDULES["1f1b"](2, 3))


def test_an_order_in_which_one_rank_would_wait_for_itself_is_refused():
    backward_first = ((Instruction(Op.B, 0, 0), Instruction(Op.F, 0, 0)),)
    with pytest.raises(ScheduleError, match="deadlock"):
        lower(backward_first, 1)
