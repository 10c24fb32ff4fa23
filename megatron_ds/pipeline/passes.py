"""Passes: pure functions Schedule → Schedule that add transfers, ties and reductions to the computations.

    add_transfers   SEND and RECV wherever neighbouring stages live on different ranks
    add_ties        TIE, the sum of gradients of parameters that live on several stages
    add_zero        REDUCE, when gradients may be reduced over data-parallel ranks; GATHER and RELEASE of a
                    stage's parameters
    forward_only    the evaluation half of a schedule
    lower           the first three, in their order

A transfer has the number of the stage that executes it: SEND_ACT@s carries the output of stage s, RECV_ACT@s
the input of stage s, SEND_GRAD@s the gradient of its input, RECV_GRAD@s the gradient of its output.

Note: why receives are posted early. RECV only *posts* a receive (a buffer into which bytes may land); the
computation that needs the tensor waits for it. A send never waits on our channels. If a receive is posted at
least one computation ahead, the transfer overlaps with that computation. It is also posted no later than the
tensor is sent, in a simulation with unit costs: then no order of instructions deadlocks, even on a transport
whose sends block until the peer has posted its receive. (Sort the instructions of all ranks by simulated
time, at equal times posts before sends before computations. Each program is in that order, and each
instruction waits only for earlier ones.)

    posted right before use   rank r    F3 SA3 | RG0 B0     r cannot pass SA3 until r+1 posts RA3,
                              rank r+1  B0 SG0 | RA3 F3     but SG0 needs RG0 of r: deadlock
    posted one ahead          rank r    F3 RG0 SA3 B0
                              rank r+1  B0 RA3 SG0 F3       both posts come first

One ahead is enough for 1F1B, but not where a rank computes something else in between: two chunks, or weight
halves.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate, chain

from ..errors import ScheduleError
from .instruction import (
    BACKWARD,
    COMPUTE,
    CONSUMED_BY,
    PRODUCED_BY,
    READS_WEIGHTS,
    Instruction,
    Op,
    Program,
    Schedule,
    stage_ranks,
)
from .simulate import run_clocks


def lower(
    schedule: Schedule,
    num_stages: int,
    *,
    tied: Iterable[int] = (),
    gather: bool = False,
    reduce_each: bool = False,
) -> Schedule:
    """A schedule ready to be executed: transfers, ties and reductions added."""
    return add_zero(
        add_ties(add_transfers(schedule, num_stages), tied),
        gather=gather,
        reduce_each=reduce_each,
    )


def add_transfers(schedule: Schedule, num_stages: int, early: bool = True) -> Schedule:
    """Add SEND right after the computation that makes a tensor, and RECV early enough (see the note above).

    early=False posts receives right before their use; tests show the deadlocks that follow.

    Stages that are neighbours on one rank exchange nothing. Receives of one channel (source, destination,
    kind) are posted in the order of its sends, so in-order channels never confuse messages.
    """
    home = stage_ranks(schedule)
    if sorted(home) != list(range(num_stages)):
        raise ScheduleError(
            f"the schedule computes stages {sorted(home)}, not the {num_stages} stages 0 to "
            f"{num_stages - 1}. Pass num_stages={len(home)}, or complete the schedule."
        )
    # Pair each computation that makes a tensor with its send, and with the receive on the peer.
    sends: list[dict[Instruction, Instruction]] = [{} for _ in schedule]
    channels: list[dict[tuple[int, Op], list[Instruction]]] = [
        defaultdict(list) for _ in schedule
    ]
    for rank, program in enumerate(schedule):
        for i in program:
            peer = i.stage + 1 if i.op is Op.F else i.stage - 1
            if i.op in PRODUCED_BY and 0 <= peer < num_stages and home[peer] != rank:
                send = PRODUCED_BY[i.op]
                sends[rank][i] = Instruction(send, i.stage, i.microbatch)
                receive = Op.RECV_ACT if send is Op.SEND_ACT else Op.RECV_GRAD
                channels[home[peer]][rank, receive].append(
                    Instruction(receive, peer, i.microbatch)
                )
    # Place them among the computations.
    posts = _latest_posts(schedule, channels) if early else [{}] * len(schedule)
    return tuple(
        _place(program, channels[rank].values(), sends[rank], posts[rank], early)
        for rank, program in enumerate(schedule)
    )


def _latest_posts(
    schedule: Schedule, channels: Sequence
) -> list[dict[Instruction, int]]:
    """For each rank: receive → number of the computation before which it is posted (see the note)."""
    starts, ends = run_clocks(schedule)
    made = {}
    for program, its_ends in zip(schedule, ends):
        made |= zip(program, its_ends)
    maker = {
        Op.RECV_ACT: lambda r: made[Instruction(Op.F, r.stage - 1, r.microbatch)],
        Op.RECV_GRAD: lambda r: (
            made.get(Instruction(Op.I, r.stage + 1, r.microbatch))
            or made[Instruction(Op.B, r.stage + 1, r.microbatch)]
        ),
    }
    posted = []
    for rank, its_channels in enumerate(channels):
        receives = chain.from_iterable(its_channels.values())
        posted.append({r: bisect_left(starts[rank], maker[r.op](r)) for r in receives})
    return posted


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
    """The forwards of a schedule; where it has been lowered, with their transfers, posted early again."""
    return tuple(_forward_program(program) for program in schedule)


def _forward_program(program: Program) -> Program:
    forward = tuple(i for i in program if i.op is Op.F)
    posts: dict[
        Instruction, int
    ] = {}  # no later among the forwards than among all computations
    number = 0
    for i in program:
        number += i.op is Op.F
        if i.op is Op.RECV_ACT:
            posts[i] = number
    sends = {i._replace(op=Op.F): i for i in program if i.op is Op.SEND_ACT}
    placed = _place(forward, [list(posts)], sends, posts, early=True)
    return _gathered(placed) if any(i.op is Op.GATHER for i in program) else placed


def _place(
    program: Program,
    channels: Collection[Sequence[Instruction]],
    sends: Mapping[Instruction, Instruction],
    latest: Mapping[Instruction, int],
    early: bool,
) -> Program:
    """`program` with `sends` after their computations, and the receives of each channel in its order.

    A receive is posted right before its use; if early, one computation before, or before computation number
    latest[receive], whichever comes first, and before the send that precedes that computation.
    """
    computations = [i for i in program if i.op in COMPUTE]
    use = {
        Instruction(CONSUMED_BY[i.op], i.stage, i.microbatch): at
        for at, i in enumerate(computations)
        if i.op in CONSUMED_BY
    }
    # Decide before which computation each receive is posted.
    posts: dict[int, list[Instruction]] = defaultdict(
        list
    )  # number of the computation → receives
    for receives in channels:
        for r in receives:
            if r not in use:
                consumers = "F" if r.op is Op.RECV_ACT else "B or I"
                raise ScheduleError(
                    f"{r} arrives on a rank that never computes {consumers} of micro-batch "
                    f"{r.microbatch} at stage {r.stage}. Complete the schedule: each "
                    "micro-batch passes every stage once."
                )
        # No later than any message behind it in the channel: a running minimum from the back.
        wanted = (
            min(max(0, use[r] - early), latest.get(r, use[r]))
            for r in reversed(receives)
        )
        for receive, at in zip(reversed(receives), accumulate(wanted, min)):
            posts[at].append(receive)
    # Walk the program; `at` is the number of computations so far.
    placed = posts[0][::-1]
    at = 0
    for i in program:
        placed.append(i)
        send = [sends[i]] if i in sends else []
        at += i.op in COMPUTE
        receives = posts[at][::-1] if i.op in COMPUTE else []
        placed += receives + send if early else send + receives
    return tuple(placed)


def _with_reduces(program: Program, reduce_each: bool) -> Program:
    completing = [at for at, i in enumerate(program) if i.op in (Op.B, Op.W)]
    if not reduce_each:
        completing = {
            program[at].stage: at for at in completing
        }.values()  # the last of each stage wins
    reduce_before = set(completing)
    result = []
    for at, i in enumerate(program):
        if at in reduce_before:
            result.append(Instruction(Op.REDUCE, i.stage))
        result.append(i)
    return tuple(result)
