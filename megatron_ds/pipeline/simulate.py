"""Runs a schedule on clocks instead of ranks: is it legal, how long does it take, what does it keep alive; draws it.

An instruction starts when its rank has finished the previous one and when what it needs is there; a schedule in which
no rank can go on is a deadlock, reported with what each rank waits for. Works on bare schedules (F, B, I, W) as well as
on lowered ones. Two kinds of sends are tried:

    buffered     a send never waits (our channels)
    rendezvous   a send waits until the peer has posted the receive, as blocking sends of large messages do; a schedule
                 that passes this test does not depend on any buffering in the transport
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from ..errors import ScheduleError
from .instruction import Instruction, Op, Schedule
from .legality import check_complete, check_marks, check_transfers
from .passes import BACKWARD, COMPUTE, CONSUMED_BY, RECEIVES, SENDS

Cost = Callable[[Instruction], float]
UNIT_COSTS = {Op.F: 1, Op.B: 2, Op.I: 1, Op.W: 1}
SEND_OF = {Op.RECV_ACT: (Op.SEND_ACT, -1), Op.RECV_GRAD: (Op.SEND_GRAD, +1)}      # receive → the send, stages away


def unit_cost(instruction: Instruction) -> float:
    """F, I and W take one unit, B two, transfers and reductions none."""
    return UNIT_COSTS.get(instruction.op, 0)


@dataclass(frozen=True)
class Simulation:
    """A schedule with the time at which each instruction starts and ends, rank by rank."""

    schedule: Schedule
    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]

    @cached_property
    def span(self) -> float:
        """From the first start to the last end."""
        return max((end for ends in self.ends for end in ends), default=0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Time each rank spends computing."""
        return tuple(sum(end - start for i, start, end in zip(*rank) if i.op in COMPUTE)
                     for rank in zip(self.schedule, self.starts, self.ends))

    @property
    def bubble(self) -> float:
        """The share of the ranks' time that is not spent computing."""
        whole = len(self.schedule) * self.span
        return 1 - sum(self.busy) / whole if whole else 0.0

    @cached_property
    def peak_live(self) -> tuple[int, ...]:
        """Per rank, the most activations (one micro-batch of one stage each) alive at once: F until its B or W."""
        trained = {(i.stage, i.microbatch) for program in self.schedule for i in program if i.op in (Op.B, Op.W)}
        grows = lambda i: i.op is Op.F and (i.stage, i.microbatch) in trained
        return tuple(_peak(program, grows, lambda i: i.op in (Op.B, Op.W)) for program in self.schedule)

    @cached_property
    def peak_receives(self) -> tuple[int, ...]:
        """Per rank, the most receives posted and not yet consumed, each a buffer of one activation."""
        received = {i for program in self.schedule for i in program if i.op in RECEIVES}
        consumes = lambda i: i.op in CONSUMED_BY and replace(i, op=CONSUMED_BY[i.op]) in received
        return tuple(_peak(program, lambda i: i.op in RECEIVES, consumes) for program in self.schedule)


def check(schedule: Schedule, num_stages: int, num_microbatches: int, *, forward_only: bool = False,
          rendezvous: bool = True) -> Simulation:
    """Raise ScheduleError unless the schedule is legal; returns its simulation with buffered sends.

    rendezvous=False admits a schedule that needs sends which do not wait for the peer.
    """
    check_complete(schedule, num_stages, num_microbatches, forward_only)
    simulation = simulate(schedule)
    if rendezvous:
        simulate(schedule, sends="rendezvous")
    return simulation


def simulate(schedule: Schedule, cost: Cost = unit_cost, sends: str = "buffered") -> Simulation:
    """Run the clocks. Raises ScheduleError for a dependency that is never met, a deadlock, or unmatched transfers.

    cost    how long an instruction takes; for a SEND, how long the tensor is under way (the sender does not wait)
    sends   "buffered" or "rendezvous"
    """
    if sends not in ("buffered", "rendezvous"):
        raise ScheduleError(f"sends={sends!r} is no kind of send. Legal: 'buffered', 'rendezvous'.")
    num_stages = 1 + max((i.stage for program in schedule for i in program), default=-1)
    check_transfers(schedule, num_stages)
    check_marks(schedule)
    needs = _Needs(schedule, num_stages, cost, sends == "rendezvous")
    ended: dict[Instruction, float] = {}
    starts, ends = [[] for _ in schedule], [[] for _ in schedule]
    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(schedule):
            while (at := len(ends[rank])) < len(program):
                needed = needs[i := program[at]]
                if any(other not in ended for other in needed):
                    break
                clock = ends[rank][-1] if at else 0
                start = max([clock, *(ended[other] + delay for other, delay in needed.items())])
                starts[rank].append(start)
                ends[rank].append(start if i.op in SENDS else start + cost(i))
                ended[i] = ends[rank][-1]
                moved = True
    _check_finished(schedule, ends, needs, ended, sends)
    return Simulation(schedule, tuple(map(tuple, starts)), tuple(map(tuple, ends)))


def draw(schedule: Schedule | Simulation, unit: float | None = None) -> str:
    """The schedule as text, one line per rank, one column per `unit` of time (default: the shortest computation).

        rank 0 | F0 F1 .. .. B0 -- .. B1 --
        rank 1 | .. F0 B0 -- F1 B1 --               "--" continues, ".." is idle, F0' is of the rank's second stage
    """
    s = schedule if isinstance(schedule, Simulation) else simulate(schedule)
    ranks = list(zip(s.schedule, s.starts, s.ends))
    if unit is None:
        lengths = (end - start for rank in ranks for i, start, end in zip(*rank) if i.op in COMPUTE)
        unit = min((length for length in lengths if length > 0), default=1)
    rows = [_row(*rank, unit) for rank in ranks]
    width = max((len(cell) for row in rows for cell in row), default=1)
    digits = len(str(len(rows) - 1))
    return "\n".join(f"rank {rank:>{digits}} | " + " ".join(_cell(cell, width) for cell in row).rstrip()
                     for rank, row in enumerate(rows))


class _Needs:
    """instruction → {instruction that must have ended: delay after its end}."""

    def __init__(self, schedule: Schedule, num_stages: int, cost: Cost, rendezvous: bool):
        self.present = {i for program in schedule for i in program}
        self.num_stages, self.cost, self.rendezvous = num_stages, cost, rendezvous
        # Everybody meets in TIE: it needs the last thing that each rank with a TIE does before its first one.
        firsts = ((program, next((at for at, i in enumerate(program) if i.op is Op.TIE), 0)) for program in schedule)
        self.before_ties = {program[at - 1]: 0.0 for program, at in firsts if at}

    def __getitem__(self, i: Instruction) -> Mapping[Instruction, float]:
        if i.op is Op.TIE:
            return self.before_ties
        if i.op in SENDS:
            return self._send(i)
        needed = {}
        if i.op in BACKWARD:
            needed[replace(i, op=Op.I if i.op is Op.W else Op.F)] = 0.0
        if i.op is Op.F and i.stage > 0:
            needed |= self._arrival(replace(i, op=Op.RECV_ACT), Instruction(Op.F, i.stage - 1, i.microbatch))
        if i.op in (Op.B, Op.I) and i.stage < self.num_stages - 1:
            needed |= self._arrival(replace(i, op=Op.RECV_GRAD), self._backward(i.stage + 1, i.microbatch))
        return needed

    def _send(self, send: Instruction) -> dict[Instruction, float]:
        stage, k = send.stage, send.microbatch
        if send.op is Op.SEND_ACT:
            made_by, receive = replace(send, op=Op.F), Instruction(Op.RECV_ACT, stage + 1, k)
        else:
            made_by, receive = self._backward(stage, k), Instruction(Op.RECV_GRAD, stage - 1, k)
        return {made_by: 0.0, receive: 0.0} if self.rendezvous else {made_by: 0.0}

    def _arrival(self, receive: Instruction, made_by: Instruction) -> dict[Instruction, float]:
        """A tensor is there when its receive is posted and its send has travelled; or, on one rank, when it is made."""
        if receive not in self.present:
            return {made_by: 0.0}
        op, away = SEND_OF[receive.op]
        send = Instruction(op, receive.stage + away, receive.microbatch)
        return {receive: 0.0, send: self.cost(send)}

    def _backward(self, stage: int, microbatch: int) -> Instruction:
        """The instruction that makes the gradient of the stage's input."""
        split = Instruction(Op.I, stage, microbatch)
        return split if split in self.present else Instruction(Op.B, stage, microbatch)


def _check_finished(schedule: Schedule, ends: list[list[float]], needs: _Needs, ended: Mapping[Instruction, float],
                    sends: str) -> None:
    place = {i: (rank, at) for rank, program in enumerate(schedule) for at, i in enumerate(program)}
    stuck = []
    for rank, program in enumerate(schedule):
        at = len(ends[rank])
        if at == len(program):
            continue
        missing = [f"{other} ({_place_of(other, place, rank, at)})" for other in needs[program[at]] if other not in ended]
        stuck.append(f"rank {rank} stands at instruction {at} of {len(program)}, {program[at]}, "
                     f"and waits for {', '.join(missing)}")
    if stuck:
        advice = ("Post receives before the sends that precede their use (add_transfers with lookahead=1 or more), or use "
                  "sends that do not wait." if sends == "rendezvous" else
                  "Legal orders put F of a stage after F of the stage before it, and B after F of its own stage and after "
                  "B of the stage behind it.")
        raise ScheduleError(f"deadlock with {sends} sends: {'; '.join(stuck)}. {advice}")


def _place_of(i: Instruction, place: Mapping[Instruction, tuple[int, int]], rank: int, at: int) -> str:
    if i not in place:
        return "in no program"
    its_rank, its_place = place[i]
    if its_rank != rank:
        return f"instruction {its_place} of rank {its_rank}"
    return f"later in the same program, at {its_place}" if its_place > at else f"earlier, at {its_place}"


def _peak(program, grows: Callable[[Instruction], bool], shrinks: Callable[[Instruction], bool]) -> int:
    """The most that is there at once; an instruction that shrinks the count does so at its end."""
    live = peak = 0
    for i in program:
        live += grows(i)
        peak = max(peak, live)
        live -= shrinks(i)
    return peak


def _row(program, starts, ends, unit: float) -> list[str]:
    stages = sorted({i.stage for i in program})
    row: list[str] = []
    for i, start, end in zip(program, starts, ends):
        if i.op in COMPUTE:
            first, stop = round(start / unit), max(round(end / unit), round(start / unit) + 1)
            row += ["."] * (first - len(row))
            row.append(f"{i.op}{i.microbatch}" + "'" * stages.index(i.stage))
            row += ["-"] * (stop - first - 1)
    return row


def _cell(text: str, width: int) -> str:
    return text * width if text in (".", "-") else text.ljust(width)
