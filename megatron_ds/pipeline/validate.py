"""Checks of a schedule that need no clock: each computation is present once, on one rank, with matching
transfers.

`simulate.py` checks dependencies and deadlocks.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from itertools import chain

from ..errors import ScheduleError
from .instruction import (
    BACKWARD,
    COMPUTE,
    FORTH,
    RECEIVES,
    SENDS,
    Instruction,
    Op,
    Schedule,
    stage_ranks,
)

Channel = tuple[int, int, str]  # (source rank, destination rank, "act" | "grad")
ABOUT_ONE_MICROBATCH = COMPUTE | SENDS | RECEIVES
MAKES = frozenset({Op.F, Op.B, Op.I})  # a tensor for a neighbouring stage
SHOWN = 6  # instructions named in an error message; the others are counted


def check_complete(
    schedule: Schedule, num_stages: int, num_microbatches: int, forward_only: bool
) -> None:
    """Each micro-batch passes each stage exactly once: F, and B or (I and W) unless `forward_only`.

    Raises ScheduleError naming the first instructions that are missing or too many.
    """
    # Stages and micro-batches exist, and a stage is on one rank.
    for program in schedule:
        for i in program:
            _check_numbers(i, num_stages, num_microbatches)
    stage_ranks(schedule)
    # Forwards: each exactly once.
    instructions = chain.from_iterable(schedule)
    counts = Counter(i for i in instructions if i.op in ABOUT_ONE_MICROBATCH)
    twice = (i for i, n in counts.items() if n > 1)
    _reject("appears more than once, but a micro-batch passes a stage once", twice)
    pairs = [(s, k) for s in range(num_stages) for k in range(num_microbatches)]
    forwards = (Instruction(Op.F, s, k) for s, k in pairs)
    missing = (i for i in forwards if i not in counts)
    _reject("is missing, so its micro-batch would not pass this stage", missing)
    # Backwards: none, or each exactly once, in one part or in two.
    if forward_only:
        backwards = (i for i in counts if i.op in BACKWARD)
        _reject("is a backward, but the schedule is forward-only", backwards)
        return
    for s, k in pairs:
        found = [op for op in (Op.B, Op.I, Op.W) if (op, s, k) in counts]
        if found not in ([Op.B], [Op.I, Op.W]):
            ops = "+".join(map(str, found))
            raise ScheduleError(
                f"the backward of micro-batch {k} at stage {s} consists of "
                f"{ops or 'nothing'}: its gradient would be missing or counted "
                "twice. Valid: B alone, or I and W."
            )


def check_transfers(schedule: Schedule, num_stages: int) -> None:
    """Sends and receives, if there are any, are exactly the needed ones, each channel in one order.

    Raises ScheduleError for the first channel in which they are not.
    """
    # A schedule without transfers is one to which they are added later.
    sent = _messages(schedule, SENDS, num_stages)
    received = _messages(schedule, RECEIVES, num_stages)
    if not sent and not received:
        return
    needed = _messages(schedule, MAKES, num_stages)
    for channel in sorted(sent.keys() | received.keys() | needed.keys()):
        source, destination, kind = channel
        name = f"channel {kind!r} from rank {source} to rank {destination}"
        # Each needed message is sent and received, and no other.
        by_side = {"sent": sent[channel], "received": received[channel]}
        for what, messages in by_side.items():
            difference = set(needed[channel]) ^ set(messages)
            if difference:
                listed = _some(sorted(difference))
                raise ScheduleError(
                    f"{name}: the messages of (stage, micro-batch) "
                    f"{listed} are needed but not {what}, or {what} but "
                    "not needed. Let add_transfers insert the sends and receives."
                )
        # Both sides have them in the same order.
        pairs = zip(sent[channel], received[channel])
        for n, (out, into) in enumerate(pairs):
            if out != into:
                raise ScheduleError(
                    f"{name}: message {n} is sent for micro-batch {out[1]} at "
                    f"stage {out[0]}, but received for micro-batch {into[1]} at "
                    f"stage {into[0]}: channels keep their order. "
                    "Post receives in the order of the sends."
                )


def check_marks(schedule: Schedule) -> None:
    """TIE comes after the last backward of its stage; REDUCE before a backward, and before the last one.

    Raises ScheduleError for the first one that stands elsewhere.
    """
    for rank, program in enumerate(schedule):
        last = {i.stage: at for at, i in enumerate(program) if i.op in BACKWARD}
        reduces = {i.stage: at for at, i in enumerate(program) if i.op is Op.REDUCE}
        # Shared weights are summed when their gradients are complete.
        for at, i in enumerate(program):
            if i.op is Op.TIE and at < last.get(i.stage, len(program)):
                raise ScheduleError(
                    f"rank {rank}: {i} at position {at} comes before the last "
                    "backward of its stage, so it would sum unfinished gradients. "
                    "Valid: any position after that backward."
                )
        # The last REDUCE of a stage announces its last backward.
        for stage, at in reduces.items():
            later = [i for i in program[at:] if i.stage == stage]
            backwards = sum(i.op in (Op.B, Op.W) for i in later)
            if backwards != 1:
                raise ScheduleError(
                    f"rank {rank}: {backwards} backwards of stage {stage} follow "
                    "its last REDUCE, which announces the one that completes the "
                    "gradients. Valid: right before the last B or W."
                )


def _check_numbers(i: Instruction, num_stages: int, num_microbatches: int) -> None:
    """Raises ScheduleError if an instruction names a stage or a micro-batch that is not there."""
    if not 0 <= i.stage < num_stages:
        raise ScheduleError(
            f"{i} names stage {i.stage}, but there are {num_stages}. Valid: 0 to "
            f"{num_stages - 1}."
        )
    # A micro-batch where the operation is about one, and none elsewhere.
    k = i.microbatch
    if i.op in ABOUT_ONE_MICROBATCH:
        is_legal = k is not None and 0 <= k < num_microbatches
        legal = f"0 to {num_microbatches - 1}"
    else:
        is_legal = k is None
        legal = "none, it is about the whole stage"
    if not is_legal:
        raise ScheduleError(
            f"{i} names micro-batch {i.microbatch}. Valid for {i.op.name}: {legal}."
        )


def _messages(
    schedule: Schedule, ops: Collection[Op], num_stages: int
) -> dict[Channel, list[tuple[int, int]]]:
    """Messages of sends, of receives, or that computations require, as (consuming stage, micro-batch)."""
    home = stage_ranks(schedule)
    channels = defaultdict(list)
    for rank, program in enumerate(schedule):
        for i in program:
            if i.op not in ops:
                continue
            # Activations go to the next stage, and gradients to the one before.
            kind, away = ("act", 1) if i.op in FORTH else ("grad", -1)
            peer = i.stage - away if i.op in RECEIVES else i.stage + away
            is_there = 0 <= peer < num_stages
            # A computation needs no transfer at the ends, or to a stage of the same rank.
            if i.op in COMPUTE and (not is_there or home[peer] == rank):
                continue
            if not is_there:
                raise ScheduleError(
                    f"{i} on rank {rank} communicates with stage {peer}, but there are "
                    f"{num_stages}: stages 0 to {num_stages - 1}. Remove it."
                )
            if i.op in RECEIVES:
                channels[home[peer], rank, kind].append((i.stage, i.k))
            else:
                channels[rank, home[peer], kind].append((peer, i.k))
    return channels


def _reject(what: str, instructions: Iterable[Instruction]) -> None:
    """Raises ScheduleError naming the instructions, if there are any."""
    found = [str(i) for i in instructions]
    if found:
        raise ScheduleError(f"{_some(found)}: {what}.")


def _some(things: list) -> str:
    """Return the first of the things, and how many more there are."""
    shown = ", ".join(map(str, things[:SHOWN]))
    if len(things) <= SHOWN:
        return shown
    return f"{shown} and {len(things) - SHOWN} more"
