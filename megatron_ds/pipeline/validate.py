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
    """Each micro-batch passes each stage exactly once: F, and B or (I and W) unless `forward_only`."""
    # Stages and micro-batches exist, and a stage is on one rank.
    for program in schedule:
        for i in program:
            _check_numbers(i, num_stages, num_microbatches)
    stage_ranks(schedule)
    # Forwards: each exactly once.
    instructions = chain.from_iterable(schedule)
    counts = Counter(i for i in instructions if i.op in ABOUT_ONE_MICROBATCH)
    _reject(
        "appears more than once, but a micro-batch passes a stage once",
        (i for i, n in counts.items() if n > 1),
    )
    pairs = [(s, k) for s in range(num_stages) for k in range(num_microbatches)]
    _reject(
        "is missing, so its micro-batch would not pass this stage",
        (Instruction(Op.F, s, k) for s, k in pairs if (Op.F, s, k) not in counts),
    )
    # Backwards: none, or each exactly once, in one part or in two.
    if forward_only:
        _reject(
            "is a backward, but the schedule is forward-only",
            (i for i in counts if i.op in BACKWARD),
        )
        return
    for s, k in pairs:
        whole = (Op.B, s, k) in counts
        halves = ((Op.I, s, k) in counts) + ((Op.W, s, k) in counts)
        if halves != (0 if whole else 2):
            ops = "+".join(
                str(op) for op in (Op.B, Op.I, Op.W) if Instruction(op, s, k) in counts
            )
            raise ScheduleError(
                f"the backward of micro-batch {k} at stage {s} consists of "
                f"{ops or 'nothing'}: its gradient would be missing or counted twice. Valid: "
                "B alone, or I and W."
            )


def check_transfers(schedule: Schedule, num_stages: int) -> None:
    """Sends and receives, if there are any, are exactly the needed ones, each channel in one order."""
    sent = _messages(schedule, SENDS, num_stages)
    received = _messages(schedule, RECEIVES, num_stages)
    if not sent and not received:
        return
    needed = _messages(schedule, MAKES, num_stages)
    for channel in sorted(sent.keys() | received.keys() | needed.keys()):
        source, destination, kind = channel
        name = f"channel {kind!r} from rank {source} to rank {destination}"
        for what, messages in (
            ("sent", sent[channel]),
            ("received", received[channel]),
        ):
            if difference := set(needed[channel]) ^ set(messages):
                raise ScheduleError(
                    f"{name}: the messages of (stage, micro-batch) "
                    f"{_some(sorted(difference))} are needed but not {what}, or {what} but "
                    "not needed. Let add_transfers insert the sends and receives."
                )
        for n, (out, into) in enumerate(zip(sent[channel], received[channel])):
            if out != into:
                raise ScheduleError(
                    f"{name}: message {n} is sent for micro-batch {out[1]} at stage "
                    f"{out[0]}, but received for micro-batch {into[1]} at stage {into[0]}: "
                    "channels keep their order. Post receives in the order of the sends."
                )


def check_marks(schedule: Schedule) -> None:
    """TIE comes after the last backward of its stage; REDUCE before a backward, and before the last one."""
    for rank, program in enumerate(schedule):
        last = {i.stage: at for at, i in enumerate(program) if i.op in BACKWARD}
        reduces = {i.stage: at for at, i in enumerate(program) if i.op is Op.REDUCE}
        for at, i in enumerate(program):
            if i.op is Op.TIE and at < last.get(i.stage, len(program)):
                raise ScheduleError(
                    f"rank {rank}: {i} at position {at} comes before the last backward of "
                    "its stage, so it would sum unfinished gradients. Valid: any position "
                    "after that backward."
                )
        for stage, at in reduces.items():
            between = [
                i for i in program[at:] if i.op in (Op.B, Op.W) and i.stage == stage
            ]
            if len(between) != 1:
                raise ScheduleError(
                    f"rank {rank}: {len(between)} backwards of stage {stage} follow its last "
                    "REDUCE, which announces the one that completes the gradients. Valid: "
                    "right before the last B or W."
                )


def _check_numbers(i: Instruction, num_stages: int, num_microbatches: int) -> None:
    if not 0 <= i.stage < num_stages:
        raise ScheduleError(
            f"{i} names stage {i.stage}, but there are {num_stages}. Valid: 0 to "
            f"{num_stages - 1}."
        )
    about_one = i.op in ABOUT_ONE_MICROBATCH
    if (
        about_one != (i.microbatch is not None)
        or about_one
        and not 0 <= i.microbatch < num_microbatches
    ):
        legal = (
            f"0 to {num_microbatches - 1}"
            if about_one
            else "none, it is about the whole stage"
        )
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
            kind, away = ("act", 1) if i.op in FORTH else ("grad", -1)
            peer = i.stage - away if i.op in RECEIVES else i.stage + away
            if i.op in COMPUTE and (not 0 <= peer < num_stages or home[peer] == rank):
                continue
            if not 0 <= peer < num_stages:
                raise ScheduleError(
                    f"{i} on rank {rank} communicates with stage {peer}, but there are "
                    f"{num_stages}: stages 0 to {num_stages - 1}. Remove it."
                )
            if i.op in RECEIVES:
                channels[home[peer], rank, kind].append((i.stage, i.microbatch))
            else:
                channels[rank, home[peer], kind].append((peer, i.microbatch))
    return channels


def _reject(what: str, instructions: Iterable[Instruction]) -> None:
    if found := [str(i) for i in instructions]:
        raise ScheduleError(f"{_some(found)}: {what}.")


def _some(things: list) -> str:
    rest = f" and {len(things) - SHOWN} more" if len(things) > SHOWN else ""
    return ", ".join(map(str, things[:SHOWN])) + rest
