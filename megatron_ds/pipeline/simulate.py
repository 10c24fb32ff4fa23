"""Simulation of a schedule: whether it is legal, how long a step takes, what stays alive.

`run_clocks` computes when each instruction of each rank starts and ends. An instruction starts when its rank
has finished the previous one and the instructions that it depends on have ended; they follow from its name:

    F s     activation of stage s - 1
    B s     F s, gradient from stage s + 1
    I s     the same
    W s     I s
    TIE     all ranks that have one have reached their first
    SEND    computation of the tensor; the message two before in its lane has arrived
    RECV    the message before in its lane has arrived

A lane is (source, destination, kind). A message moves from the time at which its receive is posted and its
tensor is sent; neither rank waits for that, except as above: a rank holds at most two sent tensors of a lane,
and posts one receive at a time. In a schedule without transfers a tensor is available when it is computed. If
no rank can proceed, the schedule deadlocks, and the error names the instruction that each rank waits for.

Half a million instructions take a second: instructions are numbered, and a blocked rank is looked at again
only when the instruction that it waits for has ended.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from operator import add

from ..errors import ScheduleError
from .instruction import (
    COMPUTE,
    CONSUMED_BY,
    RECEIVES,
    SENDS,
    TRANSFERS,
    Instruction,
    Op,
    Schedule,
    other_end,
    stage_ranks,
)
from .one_queue import check_one_queue
from .validate import check_complete, check_marks, check_transfers

Cost = Callable[[Instruction], float]
Times = list[list[float]]  # rank → its instructions' times
UNIT_COSTS = {Op.F: 1, Op.B: 2, Op.I: 1, Op.W: 1}
SENDS_UNDER_WAY = 2  # of a lane; `mpu.channels` waits for the older one before the next
# Others may wait for these.
NUMBERED = (
    Op.F,
    Op.B,
    Op.I,
    Op.W,
    Op.SEND_ACT,
    Op.RECV_ACT,
    Op.SEND_GRAD,
    Op.RECV_GRAD,
)


def unit_cost(instruction: Instruction) -> float:
    """F, I and W take one unit, B two, transfers and reductions none."""
    return UNIT_COSTS.get(instruction.op, 0)


@dataclass(frozen=True)
class Simulation:
    """A schedule with the time at which each instruction starts and ends, rank by rank."""

    schedule: Schedule
    starts: Sequence[Sequence[float]]
    ends: Sequence[Sequence[float]]

    @cached_property
    def span(self) -> float:
        """Time from the first start to the last end."""
        return max((end for ends in self.ends for end in ends), default=0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Computing time of each rank."""
        return tuple(
            sum(end - start for i, start, end in zip(*rank) if i.op in COMPUTE)
            for rank in zip(self.schedule, self.starts, self.ends)
        )

    @property
    def bubble(self) -> float:
        """Fraction of the ranks' time without computation."""
        whole = len(self.schedule) * self.span
        return 1 - sum(self.busy) / whole if whole else 0.0

    @cached_property
    def rank_spans(self) -> tuple[float, ...]:
        """Time of each rank from the start of its first computation to the end of its last."""
        spans = []
        for program, starts, ends in zip(self.schedule, self.starts, self.ends):
            computed = [at for at, i in enumerate(program) if i.op in COMPUTE]
            spans.append(ends[computed[-1]] - starts[computed[0]] if computed else 0)
        return tuple(spans)

    @cached_property
    def peak_live(self) -> tuple[int, ...]:
        """Per rank, the most activations (of a micro-batch at a stage) alive at once: from F to B or W."""
        instructions = chain.from_iterable(self.schedule)
        trained = {
            (i.stage, i.microbatch) for i in instructions if i.op in (Op.B, Op.W)
        }
        grows = lambda i: i.op is Op.F and (i.stage, i.microbatch) in trained
        return tuple(
            _peak(program, grows, lambda i: i.op in (Op.B, Op.W))
            for program in self.schedule
        )

    @cached_property
    def peak_receives(self) -> tuple[int, ...]:
        """Per rank, the most receives posted and not yet consumed, each a buffer of one activation."""
        received = {i for program in self.schedule for i in program if i.op in RECEIVES}
        consumes = lambda i: (
            i.op in CONSUMED_BY and i._replace(op=CONSUMED_BY[i.op]) in received
        )
        return tuple(
            _peak(program, lambda i: i.op in RECEIVES, consumes)
            for program in self.schedule
        )

    @cached_property
    def peak_sends(self) -> tuple[int, ...]:
        """Per rank, the most sent tensors held at once, where no send is known to be complete before it is
        waited for, as on a GPU: two a lane."""
        home = stage_ranks(self.schedule)
        peaks = []
        for program in self.schedule:
            sends = (i for i in program if i.op in SENDS)
            lanes = Counter((i.op, home[other_end(i).stage]) for i in sends)
            peaks.append(sum(min(n, SENDS_UNDER_WAY) for n in lanes.values()))
        return tuple(peaks)

    @property
    def peak_messages(self) -> tuple[int, ...]:
        """Per rank, the most buffers of messages: posted receives and held sends."""
        return tuple(map(add, self.peak_receives, self.peak_sends))


def check(
    schedule: Schedule,
    num_stages: int,
    num_microbatches: int,
    *,
    forward_only: bool = False,
) -> Simulation:
    """Raise ScheduleError unless the schedule is legal and finishes, also where streams share one hardware
    queue (one_queue.py); returns its simulation."""
    check_complete(schedule, num_stages, num_microbatches, forward_only)
    simulation = simulate(schedule)
    check_one_queue(schedule)
    return simulation


def simulate(schedule: Schedule, cost: Cost = unit_cost) -> Simulation:
    """Run the clocks. Raises ScheduleError for an unmet dependency, a deadlock, or unmatched transfers.

    cost: time of an instruction; for a SEND, of the transfer (neither rank waits for it)
    """
    num_stages = 1 + max((i.stage for program in schedule for i in program), default=-1)
    check_transfers(schedule, num_stages)
    check_marks(schedule)
    starts, ends = run_clocks(schedule, cost)
    return Simulation(schedule, tuple(map(tuple, starts)), tuple(map(tuple, ends)))


def _peak(
    program,
    grows: Callable[[Instruction], bool],
    shrinks: Callable[[Instruction], bool],
) -> int:
    """Return the highest count; an instruction that shrinks the count does so at its end."""
    live = peak = 0
    for i in program:
        live += grows(i)
        peak = max(peak, live)
        live -= shrinks(i)
    return peak


def run_clocks(schedule: Schedule, cost: Cost = unit_cost) -> tuple[Times, Times]:
    """(starts, ends) of each rank's instructions, at a cost as of `simulate`; raises its errors."""
    # Number the instructions and their dependencies.
    numbers = _Numbers(schedule)
    needs = [[numbers.needs(i) for i in program] for program in schedule]
    own = numbers.own
    starts: Times = [[] for _ in schedule]
    ends: Times = [[] for _ in schedule]
    # number → end; of a transfer: arrival if the other end is ready
    done: list[float | None] = [None] * numbers.count
    tying = sum(any(i.op is Op.TIE for i in program) for program in schedule)
    at_tie: dict[int, float] = {}  # rank → when it reached its first TIE
    waiting: dict[int, list[int]] = defaultdict(list)  # number → ranks that wait for it
    # Run each rank until it is blocked; continue it when the instruction that it waits for has ended.
    ready = list(range(len(schedule)))
    while ready:
        # A rank continues where it was blocked, at the end of its last instruction.
        rank = ready.pop()
        program = schedule[rank]
        its_needs = needs[rank]
        its_numbers = own[rank]
        its_starts = starts[rank]
        its_ends = ends[rank]
        clock = its_ends[-1] if its_ends else 0
        # An instruction begins when all that it needs has ended, and waits for what has not.
        for at in range(len(its_ends), len(program)):
            missing = None
            for number in its_needs[at]:
                time = done[number]
                if time is None:
                    missing = number
                    break
                if time > clock:
                    clock = time
            if missing is not None:
                waiting[missing].append(rank)
                break
            i = program[at]
            # A barrier of all ranks that have one.
            if i.op is Op.TIE:
                if rank not in at_tie:
                    at_tie[rank] = clock
                    if len(at_tie) < tying:
                        break
                    ready += [other for other in at_tie if other != rank]
                clock = max(clock, *at_tie.values())
            # Its times. Transfers do not occupy the rank.
            its_starts.append(clock)
            end = clock + cost(other_end(i) if i.op in RECEIVES else i)
            if i.op not in TRANSFERS:
                clock = end
            its_ends.append(clock)
            # Ranks that waited for it continue.
            its_number = its_numbers[at]
            if its_number is not None:
                done[its_number] = end
                if its_number in waiting:
                    ready += waiting.pop(its_number)
    _check_finished(schedule, ends, needs, numbers, done)
    return starts, ends


class _Numbers:
    """Instruction ↔ number, and the numbers of the instructions that it depends on."""

    def __init__(self, schedule: Schedule):
        instructions = list(chain.from_iterable(schedule))
        numbers = (i.microbatch for i in instructions if i.microbatch is not None)
        self.stages = 1 + max((i.stage for i in instructions), default=-1)
        self.microbatches = 1 + max(numbers, default=0)
        self.base = {
            op: n * self.stages * self.microbatches for n, op in enumerate(NUMBERED)
        }
        self.count = len(NUMBERED) * self.stages * self.microbatches
        self.own = [[self.of(i) for i in program] for program in schedule]
        self.present = bytearray(self.count)
        for number in chain.from_iterable(self.own):
            if number is not None:
                self.present[number] = 1
        self.before = self._transfers_before(schedule)

    def _transfers_before(self, schedule: Schedule) -> dict[Instruction, tuple]:
        """Transfer → numbers of the send and the receive of the earlier message that must have arrived."""
        home = stage_ranks(schedule)
        before = {}
        for program, own in zip(schedule, self.own):
            lanes: dict[tuple[Op, int], list[tuple]] = defaultdict(list)
            for i, number in zip(program, own):
                if i.op not in TRANSFERS:
                    continue
                peer = other_end(i)
                lane = lanes[i.op, home[peer.stage]]
                under_way = 1 if i.op in RECEIVES else SENDS_UNDER_WAY
                before[i] = lane[-under_way] if len(lane) >= under_way else ()
                lane.append((number, self.of(peer)))
        return before

    def of(self, i: Instruction) -> int | None:
        base = self.base.get(i.op)
        if base is None or i.microbatch is None:
            return None
        return base + i.stage * self.microbatches + i.microbatch

    def instruction(self, number: int) -> Instruction:
        kind, rest = divmod(number, self.stages * self.microbatches)
        return Instruction(NUMBERED[kind], *divmod(rest, self.microbatches))

    def needs(self, i: Instruction) -> tuple[int, ...]:
        """Numbers of the instructions that must have ended before this one starts."""
        op = i.op
        base = self.base
        m = self.microbatches
        if op not in base:
            return ()
        if op in RECEIVES:
            return self.before[i]
        # This micro-batch at this stage; ± m: at its neighbours.
        assert i.microbatch is not None, "computations and transfers have one"
        here = i.stage * m + i.microbatch
        # F needs the activation of the stage before; W the other half of its backward.
        if op is Op.F:
            return (
                ()
                if i.stage == 0
                else self._arrival(Op.RECV_ACT, Op.SEND_ACT, here, here - m, base[Op.F])
            )
        if op is Op.W:
            return (base[Op.I] + here,)
        # A send needs what it sends, and room for it.
        if op is Op.SEND_ACT:
            return (base[Op.F] + here, *self.before[i])
        if op is Op.SEND_GRAD:
            return (self._backward(here) + here, *self.before[i])
        # B and I need their own forward, and the gradient of the stage behind.
        forward = base[Op.F] + here
        if i.stage == self.stages - 1:
            return (forward,)
        return (
            forward,
            *self._arrival(
                Op.RECV_GRAD, Op.SEND_GRAD, here, here + m, self._backward(here + m)
            ),
        )

    def _arrival(
        self, receive: Op, send: Op, here: int, there: int, makers: int
    ) -> tuple[int, ...]:
        """Numbers that deliver a neighbour's tensor: receive and send; without a receive, its computation."""
        posted = self.base[receive] + here
        return (
            (posted, self.base[send] + there)
            if self.present[posted]
            else (makers + there,)
        )

    def _backward(self, place: int) -> int:
        """Base of the operation that makes the gradient of a stage's input: I where backward is split."""
        return (
            self.base[Op.I]
            if self.present[self.base[Op.I] + place]
            else self.base[Op.B]
        )


def _check_finished(
    schedule: Schedule,
    ends: Times,
    needs: list[list[tuple[int, ...]]],
    numbers: _Numbers,
    done: list[float | None],
) -> None:
    """Raise ScheduleError for a deadlock, with the instruction that each blocked rank waits for."""
    unfinished = [
        rank for rank, program in enumerate(schedule) if len(ends[rank]) < len(program)
    ]
    if not unfinished:
        return
    place: dict[Instruction, tuple[int, int]] = {}
    for rank, program in enumerate(schedule):
        place |= {i: (rank, at) for at, i in enumerate(program)}
    # For each rank that is blocked: its instruction, and those that it waits for.
    stuck = []
    for rank in unfinished:
        at = len(ends[rank])
        missing = [
            numbers.instruction(number)
            for number in needs[rank][at]
            if done[number] is None
        ]
        if schedule[rank][at].op is Op.TIE:
            missing = [
                schedule[other][len(ends[other])]
                for other in unfinished
                if schedule[other][len(ends[other])].op is not Op.TIE
            ]
        what = ", ".join(
            f"{other} ({_place_of(other, place, rank, at)})" for other in missing
        )
        stuck.append(
            f"rank {rank} is at instruction {at} of {len(schedule[rank])}, {schedule[rank][at]}, "
            f"and waits for {what}"
        )
    raise ScheduleError(
        f"deadlock: {'; '.join(stuck)}. In a valid order F of a stage comes after F of the previous stage, and B "
        "after F of its own stage and after B of the next stage; transfers are placed by add_transfers."
    )


def _place_of(
    i: Instruction, place: dict[Instruction, tuple[int, int]], rank: int, at: int
) -> str:
    if i not in place:
        return "in no program"
    its_rank, its_place = place[i]
    if its_rank != rank:
        return f"instruction {its_place} of rank {its_rank}"
    return (
        f"later in the same program, at {its_place}"
        if its_place > at
        else f"earlier, at {its_place}"
    )
