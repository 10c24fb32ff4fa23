"""The simulator: broken schedules are refused with the reason, clocks agree with sums done by hand, drawings
are exact."""

import pytest

from megatron_ds.errors import ScheduleError
from megatron_ds.extensions.report.picture import draw
from megatron_ds.mpu.channels import MOST_SENDS
from megatron_ds.pipeline.instruction import Instruction, Op
from megatron_ds.pipeline.passes import add_transfers, add_zero, lower
from megatron_ds.pipeline.schedules import SCHEDULES
from megatron_ds.pipeline.simulate import SENDS_UNDER_WAY, check, simulate

pytestmark = pytest.mark.plan

P, M = 3, 4
LOWERED = lower(SCHEDULES["1f1b"](P, M), P, tied=(0, 2))


def changed(rank, change):
    """LOWERED with one program changed."""
    return tuple(
        tuple(change(list(program))) if r == rank else program
        for r, program in enumerate(LOWERED)
    )


def without(*texts):
    return lambda program: [i for i in program if str(i) not in texts]


def swapped(first, second):
    def change(program):
        a, b = ([str(i) for i in program].index(text) for text in (first, second))
        program[a], program[b] = program[b], program[a]
        return program

    return change


@pytest.mark.parametrize(
    "schedule, message",
    [
        (changed(1, without("F2@1")), "F2@1: is missing"),
        (
            changed(1, without("B2@1")),
            "backward of micro-batch 2 at stage 1 consists of nothing.*Valid: B alone, or I and W",
        ),
        (
            changed(1, lambda p: [*p, Instruction(Op.F, 1, 0)]),
            "F0@1: appears more than once",
        ),
        (changed(1, lambda p: [*p, Instruction(Op.W, 1, 0)]), r"consists of B\+W"),
        (
            changed(1, lambda p: [*p, Instruction(Op.F, 1, M)]),
            "names micro-batch 4. Valid for F: 0 to 3",
        ),
        (
            changed(1, lambda p: [*p, Instruction(Op.REDUCE, 1, 2)]),
            "names micro-batch 2. Valid for REDUCE: none",
        ),
        (
            changed(1, lambda p: [*p, Instruction(Op.REDUCE, P)]),
            "names stage 3, but there are 3. Valid: 0 to 2",
        ),
        (
            changed(1, lambda p: [*p, Instruction(Op.F, 0, 0)]),
            "F0@0 is on pipeline rank 1, but stage 0 is on rank 0",
        ),
        (
            changed(1, without("SA3@1")),
            r"'act' from rank 1 to rank 2: .*\(2, 3\) are needed but not sent",
        ),
        (
            changed(1, without("RG3@1")),
            r"'grad' from rank 2 to rank 1: .*\(1, 3\) are needed but not received",
        ),
        (
            changed(2, lambda p: [*p, Instruction(Op.SEND_ACT, 2, 0)]),
            "SA0@2 on rank 2 communicates with stage 3",
        ),
        (
            changed(0, lambda p: [*p, Instruction(Op.RECV_ACT, 0, 0)]),
            "RA0@0 on rank 0 communicates with stage -1",
        ),
        (
            changed(1, swapped("RA0@1", "RA1@1")),
            "message 0 is sent for micro-batch 0 at stage 1, but received for micro-batch 1",
        ),
        (
            changed(1, swapped("B0@1", "B3@1")),
            "rank 1 is at .*B3@1, and waits for F3@1 .later in the same program",
        ),
        (
            changed(1, swapped("SA0@1", "F0@1")),
            "rank 1 is at .*SA0@1, and waits for F0@1 .later in the same program",
        ),
        (
            changed(2, lambda p: [p[-1], *p[:-1]]),
            "TIE@2 at position 0 comes before the last backward",
        ),
        (
            changed(1, swapped("REDUCE@1", "B0@1")),
            "4 backwards of stage 1 follow its last REDUCE",
        ),
        (
            changed(1, lambda p: [*p, Instruction(Op.REDUCE, 1)]),
            "0 backwards of stage 1 follow its last REDUCE",
        ),
    ],
)
def test_a_broken_schedule_is_refused_with_what_is_wrong(schedule, message):
    check(LOWERED, P, M)
    with pytest.raises(ScheduleError, match=message):
        check(schedule, P, M)


def test_a_receive_posted_after_the_computation_that_needs_it_is_a_deadlock():
    first, second = lower(SCHEDULES["gpipe"](2, 1), 2)
    assert [str(i) for i in second[:2]] == ["RA0@1", "F0@1"]
    with pytest.raises(
        ScheduleError,
        match="deadlock: .*rank 1 is at instruction 0 .*waits for RA0@1 .later in the",
    ):
        simulate((first, (second[1], second[0], *second[2:])))


def test_a_schedule_for_fewer_microbatches_than_asked_is_refused():
    with pytest.raises(ScheduleError, match="F4@0, F4@1, F4@2: is missing"):
        check(LOWERED, P, M + 1)


def test_a_backward_has_no_place_in_evaluation():
    with pytest.raises(
        ScheduleError,
        match="B0@0, .* and 6 more: is a backward, but the schedule is forward-only",
    ):
        check(LOWERED, P, M, forward_only=True)


def test_a_rank_holds_two_sends_of_a_lane_and_posts_one_receive_at_a_time():
    forward = lambda s: [Instruction(Op.F, s, k) for k in range(5)]
    first, second = add_transfers((tuple(forward(0)), tuple(forward(1))), 2)
    slow = lambda i: 10 if i == Instruction(Op.F, 1, 0) else int(i.op is Op.F)
    ends = dict(zip(first, simulate((first, second), slow).ends[0]))
    # Messages 0 and 1 have arrived, 2 and 3 are under way; the next one waits for the receive of message 2.
    sent = [ends[Instruction(Op.SEND_ACT, 0, k)] for k in range(5)]
    assert sent == [1, 2, 3, 4, 11]
    # The second receive waits for the first message.
    early = (*second[:1], *[i for i in second if i.op is Op.RECV_ACT][1:])
    rest = tuple(i for i in second if i.op is not Op.RECV_ACT)
    starts = dict(zip(early, simulate((first, early + rest), slow).starts[1]))
    posted = [starts[Instruction(Op.RECV_ACT, 1, k)] for k in range(5)]
    assert posted == [0, 1, 2, 3, 4]


def test_the_sends_under_way_are_those_of_the_channels():
    assert SENDS_UNDER_WAY == MOST_SENDS


def test_reductions_before_every_backward_are_legal():
    schedule = add_zero(add_transfers(SCHEDULES["1f1b"](P, M), P), reduce_each=True)
    check(schedule, P, M)
    assert sum(i.op is Op.REDUCE for program in schedule for i in program) == P * M


def test_the_slowest_stage_sets_the_pace():
    cost = lambda i: {Op.F: 1, Op.B: 2}.get(i.op, 0) * (5 if i.stage == 1 else 1)
    simulation = simulate(add_transfers(SCHEDULES["1f1b"](2, 6), 2), cost)
    assert (
        simulation.span == 1 + 6 * 15 + 2
    )  # first F, the slow rank without a pause, last B
    assert simulation.busy == (18, 90)


def test_travel_time_is_added_once_per_hop():
    cost = lambda i: {Op.F: 1, Op.B: 2, Op.SEND_ACT: 0.25, Op.SEND_GRAD: 0.5}.get(
        i.op, 0
    )
    simulation = simulate(add_transfers(SCHEDULES["gpipe"](4, 1), 4), cost)
    assert simulation.span == 4 * 3 + 3 * 0.25 + 3 * 0.5


def test_split_backward_keeps_activations_until_the_weight_half_and_frees_the_neighbour_after_the_input_one():
    make = lambda s, text: tuple(
        Instruction(Op(word[0]), s, int(word[1:])) for word in text.split()
    )
    schedule = (make(0, "F0 F1 I0 I1 W0 W1"), make(1, "F0 I0 F1 I1 W0 W1"))
    simulation = check(lower(schedule, 2), 2, 2)
    assert simulation.peak_live == (2, 2)
    assert (
        simulation.starts[0][[str(i) for i in simulation.schedule[0]].index("I0@0")]
        == 3
    )


def test_an_empty_schedule_takes_no_time():
    assert simulate(((), ())).span == 0 and simulate(((), ())).bubble == 0


def test_the_drawing_shows_the_time_line_of_each_rank():
    assert (
        draw(SCHEDULES["1f1b"](3, 4))
        == """\
rank 0 | F0 F1 F2 .. .. .. .. B0 -- F3 B1 -- .. B2 -- .. B3 --
rank 1 | .. F0 F1 .. .. B0 -- F2 B1 -- F3 B2 -- .. B3 --
rank 2 | .. .. F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 --"""
    )


def test_the_drawing_of_a_timed_simulation_is_to_scale():
    slow = simulate(SCHEDULES["gpipe"](2, 1), lambda i: {Op.F: 2, Op.B: 3}[i.op])
    assert (
        draw(slow, unit=1)
        == """\
rank 0 | F0 -- .. .. .. .. .. B0 -- --
rank 1 | .. .. F0 -- B0 -- --"""
    )


def test_the_drawing_marks_later_chunks_of_a_rank():
    f, b = (lambda s, op=op: Instruction(op, s, 0) for op in (Op.F, Op.B))
    assert (
        draw(simulate(((f(0), f(2), b(2), b(0)), (f(1), f(3), b(3), b(1)))))
        == """\
rank 0 | F0  ... F0' ... ... ... B0' --- ... ... B0  ---
rank 1 | ... F0  ... F0' B0' --- ... ... B0  ---"""
    )
