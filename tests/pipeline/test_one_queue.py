"""Schedules on GPUs whose streams share one hardware queue: those of the package finish, planted ones do not."""

import itertools
from bisect import bisect_left
from collections import defaultdict
from itertools import accumulate

import pytest

from megatron_ds.errors import ScheduleError
from megatron_ds.pipeline.instruction import (
    COMPUTE,
    CONSUMED_BY,
    RECEIVES,
    SENDS,
    Instruction,
    Op,
    other_end,
    stage_ranks,
)
from megatron_ds.pipeline.one_queue import check_one_queue
from megatron_ds.pipeline.passes import add_transfers, forward_only, lower
from megatron_ds.pipeline.schedules import SCHEDULES
from megatron_ds.pipeline.simulate import check, run_clocks, simulate
from tests.harness.samples import ALL

pytestmark = [pytest.mark.plan, pytest.mark.one_in(2)]

# Schedule → shapes of `usual_shapes` that deadlock when a lane has several posted receives, from a model with
# streams, events and any number of queues.
POSTED_AHEAD = {
    "gpipe": (30, 35),
    "interleaved": (71, 105),
    "1f1b": (7, 35),
    "zb-h1": (5, 35),
    "zb-h2": (5, 35),
    "zb-v": (10, 35),
    "zb-auto": (0, 35),
}


def usual_shapes(name):
    """(ranks, micro-batches, chunks)."""
    chunks = SCHEDULES[name].chunks or (1, 2, 3)
    return [
        (p, m, v)
        for p in (2, 3, 4, 6, 8)
        for v in chunks
        for m in (1, 2, 3, p, p + 1, 2 * p, 4 * p)
    ]


def posted_ahead(schedule, num_stages):
    """Transfers with receives that are posted no later than their message is sent, and before sends.

    A lane has several posted receives at a time.
    """
    starts, ends = run_clocks(schedule)
    lowered = add_transfers(schedule, num_stages)
    home = stage_ranks(schedule)
    made = {
        (i.stage, i.microbatch, i.op is Op.F): end
        for program, its_ends in zip(schedule, ends)
        for i, end in zip(program, its_ends)
        if i.op is not Op.W
    }
    programs = []
    for rank, program in enumerate(lowered):
        computations = schedule[rank]
        use = {
            Instruction(CONSUMED_BY[i.op], i.stage, i.microbatch): at
            for at, i in enumerate(computations)
            if i.op in CONSUMED_BY
        }
        lanes = defaultdict(list)
        for i in program:
            if i.op in RECEIVES:
                lanes[i.op, home[other_end(i).stage]].append(i)
        posts = defaultdict(list)
        for receives in lanes.values():
            wanted = [
                min(
                    max(0, use[r] - 1),
                    bisect_left(
                        starts[rank],
                        made[other_end(r)[1:] + (r.op is Op.RECV_ACT,)],
                    ),
                )
                for r in receives
            ]
            latest = [*accumulate(reversed(wanted), min)][::-1]
            for r, at in zip(receives, latest):
                posts[at].append(r)
        placed = posts[0]
        number = 0
        for i in program:
            if i.op in COMPUTE:
                number += 1
                placed = [*placed, i, *posts[number]]
            elif i.op in SENDS:
                placed = [*placed, i]
        programs.append(tuple(placed))
    return tuple(programs)


def finishes(schedule):
    try:
        check_one_queue(schedule)
    except ScheduleError as error:
        assert "CUDA_DEVICE_MAX_CONNECTIONS=1" in str(error)
        return False
    return True


@pytest.mark.parametrize("name", POSTED_AHEAD)
def test_receives_posted_ahead_deadlock_in_the_known_numbers_of_shapes_and_those_of_the_package_in_none(
    name,
):
    stuck = 0
    shapes = usual_shapes(name)
    for p, m, v in shapes:
        order = SCHEDULES[name](p, m, v)
        stuck += not finishes(posted_ahead(order, p * v))
        assert finishes(lower(order, p * v, tied={0, p * v - 1}))
    assert (stuck, len(shapes)) == POSTED_AHEAD[name]


def many_shapes(ranks):
    """(micro-batches, chunks) below, at and above multiples of the ranks; `make test-all` has all between."""
    most = 3 * ranks
    edges = {1, 2, ranks - 1, ranks, ranks + 1, 2 * ranks - 1, 2 * ranks, most}
    numbers = range(1, most + 1) if ALL else sorted(edges)
    return itertools.product(numbers, (1, 2, 3, 4))


@pytest.mark.parametrize("name", SCHEDULES.names())
def test_every_registered_schedule_finishes_for_all_ranks_micro_batches_and_chunks(
    name,
):
    for p in range(2, 9):
        for m, v in many_shapes(p):
            try:
                order = SCHEDULES[name](p, m, v)
            except ScheduleError:
                continue
            lowered = lower(order, p * v)
            check_one_queue(lowered)
            check_one_queue(forward_only(lowered))


@pytest.mark.parametrize("group", (4, 5, 7, 9))
def test_larger_groups_of_the_interleaved_schedule_finish_in_the_same_time(group):
    for m in (8, 12, 20):
        order = SCHEDULES["interleaved"](4, m, 3, group_size=group)
        assert check(lower(order, 12), 12, m).span == simulate(order).span


def test_a_deadlock_is_reported_with_what_each_rank_waits_for():
    order = SCHEDULES["gpipe"](2, 2)
    planted = posted_ahead(order, 2)
    assert (
        " ".join(map(str, planted[0])) == "F0@0 RG0@0 SA0@0 F1@0 RG1@0 SA1@0 B0@0 B1@0"
    )
    with pytest.raises(
        ScheduleError,
        match=r"rank 0 is at RG1@0, which waits for the gradient of micro-batch 0 for stage 0; rank 1 is at "
        r"F1@1, which waits for the activation of micro-batch 1 for stage 1\. .*add_transfers",
    ):
        check_one_queue(planted)


def test_the_contract_of_schedules_finds_it():
    planted = posted_ahead(SCHEDULES["gpipe"](2, 2), 2)
    with pytest.raises(ScheduleError, match="deadlock"):
        check(planted, 2, 2)


def test_a_send_behind_one_that_is_not_received_holds_up_the_rank():
    f = lambda s, k: Instruction(Op.F, s, k)
    sends = [Instruction(Op.SEND_ACT, 0, k) for k in range(3)]
    receives = [Instruction(Op.RECV_ACT, 1, k) for k in range(3)]
    first = (f(0, 0), sends[0], f(0, 1), sends[1], f(0, 2), sends[2])
    check_one_queue((first, (*receives, f(1, 0), f(1, 1), f(1, 2))))
    with pytest.raises(ScheduleError, match="rank 0 is at SA1@0.*rank 1 is at F2@1"):
        check_one_queue((first, (f(1, 0), *receives[2:], f(1, 2))))


def test_a_tie_waits_for_all_ranks_that_have_one():
    lowered = lower(SCHEDULES["1f1b"](2, 2), 2, tied=(0, 1))
    check_one_queue(lowered)
    *program, last_send, tie = lowered[1]
    with pytest.raises(
        ScheduleError,
        match="rank 0 is at B1@0.*rank 1 is at TIE@1, which waits for the other",
    ):
        check_one_queue((lowered[0], (*program, tie, last_send)))
