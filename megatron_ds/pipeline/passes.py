"""Passes: pure functions Schedule → Schedule that add transfers, ties and reductions to the computations.

    add_transfers   SEND and RECV wherever neighbouring stages live on different ranks
    add_ties        TIE, the sum of gradients of parameters that live on several stages
    add_zero        REDUCE, when gradients may be reduced over data-parallel ranks; GATHER and RELEASE of a
                    stage's parameters
    forward_only    the evaluation half of a schedule
    lower           the first three, in their order

A transfer has the number of the stage that executes it: SEND_ACT@s carries the output of stage s, RECV_ACT@s
the input of stage s, SEND_GRAD@s the gradient of its input, RECV_GRAD@s the gradient of its output.

Note: when receives are posted. A posted receive is a buffer into which bytes may land; on a GPU it is a
kernel that occupies its lane (the stream of one source and kind) until the message has come. CUDA puts several
streams into one hardware queue, where a second receive of the lane would stand in front of everything that was
launched after it, maybe of the send for which the first one waits. So a rank posts the next receive of a lane
when the message before it has arrived (`Channels.recv` waits for it), usually right before the computation that
consumes that message:

    rank r      F0 SA0 RG0 F1 SA1 RG1 B0 ...       RG1 waits for gradient 0: it comes right before B0,
    rank r+1    RA0 RA1 F0 SG0 ...                 not before SA1, without which r+1 may never send it

A receive is posted when its message is made, in a simulation with unit costs, or later, when the message
before it is consumed; but one computation ahead of its use, so that the transfer overlaps with it, and before
the message behind it is made. Then no order of instructions deadlocks, even on a transport where a send waits
until the one before it has been received. (Each instruction has a time: a computation when it starts, a send
when its tensor is made, a receive as above. At equal times the order is FIRST, SENDING, LAST, COMPUTING. Each
program is sorted by these times, and each instruction waits for earlier ones only: a receive for the send of
the message before it, a send for the receive of the message before it.)
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from operator import itemgetter
from typing import NamedTuple

from ..errors import ScheduleError
from .instruction import (
    BACKWARD,
    CONSUMED_BY,
    FORTH,
    PRODUCED_BY,
    READS_WEIGHTS,
    Instruction,
    Op,
    Program,
    Schedule,
    stage_ranks,
)

# Order at one time.
FIRST, SENDING, LAST, COMPUTING = range(4)
Moment = tuple[float, int]


class Message(NamedTuple):
    """A tensor between two ranks. made: when the computation ends that makes it, in units."""

    send: Instruction
    receive: Instruction
    made: float


def lower(
    schedule: Schedule,
    num_stages: int,
    *,
    tied: Iterable[int] = (),
    gather: bool = False,
    reduce_each: bool = False,
) -> Schedule:
    """Return a schedule ready to be executed: transfers, ties and reductions added."""
    return add_zero(
        add_ties(add_transfers(schedule, num_stages), tied),
        gather=gather,
        reduce_each=reduce_each,
    )


def add_transfers(schedule: Schedule, num_stages: int) -> Schedule:
    """Add SEND right after the computation that makes a tensor, and RECV as the note above describes.

    Stages that are neighbours on one rank exchange nothing. Receives of one lane (source, destination, kind)
    are posted in the order of its sends, so lanes never confuse messages.
    """
    home = stage_ranks(schedule)
    if sorted(home) != list(range(num_stages)):
        raise ScheduleError(
            f"the schedule computes stages {sorted(home)}, not the {num_stages} stages 0 to "
            f"{num_stages - 1}. Pass num_stages={len(home)}, or complete the schedule."
        )
    if len(schedule) == 1 and is_in_order(schedule[0]):
        return schedule
    # The simulator is loaded by runs with several pipeline ranks.
    from .simulate import run_clocks

    starts, ends = run_clocks(schedule)
    timed = [
        [((start, COMPUTING), i) for start, i in zip(its_starts, program)]
        for its_starts, program in zip(starts, schedule)
    ]
    for (source, destination, _), messages in _lanes(schedule, home, ends).items():
        timed[source] += [((m.made, SENDING), m.send) for m in messages]
        posts = _posts(messages, schedule[destination], starts[destination])
        timed[destination] += zip(posts, (m.receive for m in messages))
    return tuple(
        tuple(i for _, i in sorted(of_rank, key=itemgetter(0))) for of_rank in timed
    )


def is_in_order(program: Program) -> bool:
    """Return whether one rank can compute its only stage in this order: each forward before its backward."""
    done: set[tuple[Op, int | None]] = set()
    needed = {Op.B: Op.F, Op.I: Op.F, Op.W: Op.I}
    for i in program:
        before = needed.get(i.op)
        if i.stage or (before is not None and (before, i.microbatch) not in done):
            return False
        done.add((i.op, i.microbatch))
    return True


def _lanes(
    schedule: Schedule, home: Mapping[int, int], ends: Sequence[Sequence[float]]
) -> dict[tuple[int, int, Op], list[Message]]:
    """(source, destination, receive) → messages between the two ranks, in the order in which they are made."""
    lanes: dict[tuple[int, int, Op], list[Message]] = defaultdict(list)
    for rank, (program, its_ends) in enumerate(zip(schedule, ends)):
        for i, made in zip(program, its_ends):
            peer = i.stage + 1 if i.op is Op.F else i.stage - 1
            if i.op not in PRODUCED_BY or home.get(peer, rank) == rank:
                continue
            receive = Op.RECV_ACT if i.op is Op.F else Op.RECV_GRAD
            lanes[rank, home[peer], receive].append(
                Message(
                    i._replace(op=PRODUCED_BY[i.op]),
                    Instruction(receive, peer, i.microbatch),
                    made,
                )
            )
    return lanes


def _posts(
    messages: Sequence[Message], program: Program, starts: Sequence[float]
) -> list[Moment]:
    """Return when the receives of a lane are posted. program, starts: of the rank that receives."""
    use_of = _uses(program)
    for message in messages:
        if message.receive not in use_of:
            raise _never_used(message.receive)
    uses = [use_of[message.receive] for message in messages]
    posts = []
    for n, (message, use) in enumerate(zip(messages, uses)):
        post = (message.made, FIRST)
        if n > 0:
            post = max(post, (starts[uses[n - 1]], LAST))
        if n + 1 < len(messages):
            post = min(post, (messages[n + 1].made, FIRST))
        post = min(post, (starts[max(0, use - 1)], LAST))
        # Where messages are consumed in another order: not before the message before it is made.
        if n > 0:
            post = max(post, (messages[n - 1].made, LAST))
        posts.append(post)
    # No later than any receive behind it in the lane: a running minimum from the back.
    return [*accumulate(reversed(posts), min)][::-1]


def _uses(program: Program) -> dict[Instruction, int]:
    """Receive → place in `program` of the computation that consumes its message."""
    return {
        Instruction(CONSUMED_BY[i.op], i.stage, i.microbatch): at
        for at, i in enumerate(program)
        if i.op in CONSUMED_BY
    }


def _never_used(receive: Instruction) -> ScheduleError:
    consumers = "F" if receive.op is Op.RECV_ACT else "B or I"
    return ScheduleError(
        f"{receive} arrives on a rank that never computes {consumers} of micro-batch "
        f"{receive.microbatch} at stage {receive.stage}. Complete the schedule: each "
        "micro-batch passes every stage once."
    )


def add_ties(schedule: Schedule, stages: Iterable[int]) -> Schedule:
    """Add TIE at the end of the programs for each of `stages`, which hold a copy of a tied parameter.

    Not right after the stage's own last backward: TIE waits for the other holders, and with several chunks
    per rank those may wait for a backward that comes later on this rank.
    """
    stages = sorted(set(stages))
    home = stage_ranks(schedule)
    trained = {i.stage for program in schedule for i in program if i.op in BACKWARD}
    for stage in stages:
        if stage not in trained:
            raise ScheduleError(
                f"stage {stage} was given as a holder of a tied parameter, but the schedule "
                "computes no backward of it. Stages with a backward: "
                f"{sorted(trained) or 'none (forward only)'}."
            )
    return tuple(
        program + tuple(Instruction(Op.TIE, s) for s in stages if home[s] == rank)
        for rank, program in enumerate(schedule)
    )


def add_zero(
    schedule: Schedule, *, gather: bool = False, reduce_each: bool = False
) -> Schedule:
    """Add REDUCE before the last B or W of a stage: "the next one completes the gradients of this stage".

    reduce_each  REDUCE before every B or W: only shards of gradients are kept, so each micro-batch is reduced
    gather       keep sharded parameters gathered: GATHER before the first computation of each stage, RELEASE
                 after the last that reads them. Without it, layers are gathered one by one, independently of
                 the schedule
    """
    reduced = tuple(_with_reduces(program, reduce_each) for program in schedule)
    return tuple(map(_gathered, reduced)) if gather else reduced


def _gathered(program: Program) -> Program:
    readers = [(at, i.stage) for at, i in enumerate(program) if i.op in READS_WEIGHTS]
    last = {stage: at for at, stage in readers}
    first = {stage: at for at, stage in reversed(readers)}
    gathered: list[Instruction] = []
    for at, i in enumerate(program):
        if first.get(i.stage) == at:
            gathered.append(Instruction(Op.GATHER, i.stage))
        gathered.append(i)
        if last.get(i.stage) == at:
            gathered.append(Instruction(Op.RELEASE, i.stage))
    return tuple(gathered)


def forward_only(schedule: Schedule) -> Schedule:
    """Return the forwards of a schedule; where it has been lowered, with their transfers."""
    return tuple(_forward_program(program) for program in schedule)


def _forward_program(program: Program) -> Program:
    forward = _one_ahead(tuple(i for i in program if i.op in FORTH))
    return _gathered(forward) if any(i.op is Op.GATHER for i in program) else forward


def _one_ahead(program: Program) -> Program:
    """`program`, a forward-only one, with each receive posted at least one forward ahead of its use.

    A receive that is used before an earlier one stays where it is. For all others the messages before have
    been consumed when the forward ahead begins, or are consumed by it, so the receive waits for nothing more.
    """
    uses = _uses(tuple(i for i in program if i.op is Op.F))
    timed = []
    number = 0  # of forwards so far
    latest = -1  # use of the receives so far
    for i in program:
        moment = (number, COMPUTING if i.op is Op.F else FIRST)
        if i.op is Op.RECV_ACT:
            if uses[i] > latest:
                moment = min(moment, (max(0, uses[i] - 1), LAST))
            latest = max(latest, uses[i])
        timed.append((moment, i))
        number += i.op is Op.F
    return tuple(i for _, i in sorted(timed, key=itemgetter(0)))


def _with_reduces(program: Program, reduce_each: bool) -> Program:
    completing = [at for at, i in enumerate(program) if i.op in (Op.B, Op.W)]
    if not reduce_each:
        # The last of each stage wins.
        completing = [*{program[at].stage: at for at in completing}.values()]
    reduce_before = set(completing)
    result = []
    for at, i in enumerate(program):
        if at in reduce_before:
            result.append(Instruction(Op.REDUCE, i.stage))
        result.append(i)
    return tuple(result)
