"""Whether a lowered schedule finishes on GPUs whose streams share one hardware queue.

CUDA puts the work of several streams into few queues (32 at most, 8 by default, one with
CUDA_DEVICE_MAX_CONNECTIONS=1). A queue is first in, first out: while the work at its head waits for earlier
work of its stream or for an event, everything behind it waits, too, whatever its stream. Here each rank has a
single queue, filled in the order of its program:

    F, B, I        wait for their message
    RECV           waits for the message before it in its lane, then occupies the lane
    SEND           the same
    TIE            a collective, which waits for all ranks that have one
    end of a step  waits for all sends

A message is complete when its send and its receive have both left their queues. Computations take no time: a
deadlock does not depend on time. With more queues each of them holds a part of this order, so a schedule that
finishes with one queue finishes with any number, however the streams are distributed.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from ..errors import ScheduleError
from .instruction import (
    CONSUMED_BY,
    RECEIVES,
    SENDS,
    TRANSFERS,
    Instruction,
    Op,
    Program,
    Schedule,
    other_end,
    stage_ranks,
)

TIES = Instruction(Op.TIE, 0)  # of all ranks


class Item(NamedTuple):
    """An entry of a queue. Messages have the names of their receives.

    instruction  that it belongs to; None at the end of the step
    needs        message that must be complete before the entry leaves the queue
    starts       message of which the entry is one end
    """

    instruction: Instruction | None
    needs: Instruction | None
    starts: Instruction | None


def check_one_queue(schedule: Schedule) -> None:
    """Raise ScheduleError, with the instruction at the head of each blocked queue, unless all ranks finish.

    schedule: lowered, with matching transfers
    """
    home = stage_ranks(schedule)
    queues = [_queue(program, home) for program in schedule]
    tying = sum(any(i.op is Op.TIE for i in program) for program in schedule)
    missing = defaultdict(lambda: 2, {TIES: tying})  # ends that have not started
    heads = [0] * len(queues)
    # Let each rank run until it is blocked; repeat while one has moved.
    moved = True
    while moved:
        moved = False
        for rank, queue in enumerate(queues):
            before = heads[rank]
            heads[rank] = _run(queue, before, missing)
            moved |= heads[rank] > before
    # Report those that are blocked.
    blocked = [
        f"rank {rank} is at {_text(queue[head])}"
        for rank, (queue, head) in enumerate(zip(queues, heads))
        if head < len(queue)
    ]
    if blocked:
        raise ScheduleError(
            "deadlock on GPUs whose streams share a hardware queue (always with CUDA_DEVICE_MAX_CONNECTIONS=1): "
            f"{'; '.join(blocked)}. A receive or send waits for the one before it in its lane, and all later "
            "instructions of its rank wait behind it. Post a receive when the message before it has arrived, "
            "as add_transfers does."
        )


def _queue(program: Program, home: dict[int, int]) -> Sequence[Item]:
    """Return the program of one rank as entries of its queue."""
    items = []
    received: set[Instruction] = set()
    last: dict[tuple[Op, int], Instruction] = {}  # (operation, peer) → message
    for i in program:
        if i.op in CONSUMED_BY:
            message = Instruction(CONSUMED_BY[i.op], i.stage, i.microbatch)
            if message in received:
                items.append(Item(i, message, None))
        # Messages of one kind to one rank keep their order.
        elif i.op in TRANSFERS:
            peer = other_end(i)
            message = i if i.op in RECEIVES else peer
            lane = (i.op, home[peer.stage])
            items.append(Item(i, last.get(lane), message))
            last[lane] = message
            if i.op in RECEIVES:
                received.add(message)
        elif i.op is Op.TIE and (not items or items[-1].needs != TIES):
            items += [Item(i, None, TIES), Item(i, TIES, None)]
    # The step ends when the last messages have been received.
    sent = [message for (op, _), message in last.items() if op in SENDS]
    return items + [Item(None, message, None) for message in sent]


def _run(queue: Sequence[Item], head: int, missing: dict[Instruction, int]) -> int:
    """Dispatch entries from `head` on; returns the first that is blocked."""
    while head < len(queue):
        item = queue[head]
        if item.needs is not None and missing[item.needs] > 0:
            break
        if item.starts is not None:
            missing[item.starts] -= 1
        head += 1
    return head


def _text(item: Item) -> str:
    at = "the end of the step" if item.instruction is None else str(item.instruction)
    message = item.needs
    assert message is not None, "an entry that needs nothing is not blocked"
    if message == TIES:
        return f"{at}, which waits for the other ranks"
    kind = "activation" if message.op is Op.RECV_ACT else "gradient"
    return f"{at}, which waits for the {kind} of micro-batch {message.microbatch} for stage {message.stage}"
