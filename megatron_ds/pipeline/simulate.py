"""Runs a schedule on clocks instead of ranks: is it legal, how long does it take, what does it keep alive?

An instruction starts when its rank has finished the previous one and when what it needs is there; a schedule in which
no rank can go on is a deadlock, reported with what each rank waits for. Works on bare schedules (F, B, I, W) as well as
on lowered ones. Two kinds of sends are tried:

    buffered     a send never waits (our channels)
    rendezvous   a send waits until the peer has posted the receive, as blocking sends of large messages do; a schedule
                 that passes this test does not depend on any buffering in the transport
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from ..errors import ScheduleError
from .clock import Cost, run_clocks, unit_cost
from .instruction import Instruction, Op, Schedule
from .passes import COMPUTE, CONSUMED_BY, RECEIVES
from .validate import check_complete, check_marks, check_transfers


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
    def rank_spans(self) -> tuple[float, ...]:
        """Time of each rank from the start of its first computation to the end of its last."""
        spans = []
        for program, starts, ends in zip(self.schedule, self.starts, self.ends):
            computed = [at for at, i in enumerate(program) if i.op in COMPUTE]
            spans.append(ends[computed[-1]] - starts[computed[0]] if computed else 0)
        return tuple(spans)

    @property
    def rank_bubble(self) -> float:
        """The share of the longest of `rank_spans` that exceeds the most work of a rank.

        This is the bubble rate of Qi et al. 2024, tables 5 and 6. It does not count that a late rank starts later than the
        first, which costs nothing only if ranks go into the next step as they finish this one; `bubble` does.
        """
        longest = max(self.rank_spans, default=0)
        return 1 - max(self.busy) / longest if longest else 0.0

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
        consumes = lambda i: i.op in CONSUMED_BY and i._replace(op=CONSUMED_BY[i.op]) in received
        return tuple(_peak(program, lambda i: i.op in RECEIVES, consumes) for program in self.schedule)


def check(schedule: Schedule, num_stages: int, num_microbatches: int, *, forward_only: bool = False,
          rendezvous: bool = True) -> Simulation:
    """Raise ScheduleError unless the schedule is legal; returns its simulation with buffered sends.

    rendezvous=False admits a schedule that needs sends which do not wait for the peer.
    """
    check_complete(schedule, num_stages, num_microbatches, forward_only)
    simulation = simulate(schedule)
    if rendezvous:
        run_clocks(schedule, rendezvous=True)
    return simulation


def simulate(schedule: Schedule, cost: Cost = unit_cost, sends: str = "buffered") -> Simulation:
    """Run the clocks. Raises ScheduleError for a dependency that is never met, a deadlock, or unmatched transfers.

    cost    how long an instruction takes; for a SEND, how long the tensor is under way (the sender does not wait)
    sends   "buffered" or "rendezvous"
    """
    if sends not in ("buffered", "rendezvous"):
        raise ScheduleError(f"sends={sends!r} is not a kind of send. Valid: 'buffered', 'rendezvous'.")
    num_stages = 1 + max((i.stage for program in schedule for i in program), default=-1)
    check_transfers(schedule, num_stages)
    check_marks(schedule)
    starts, ends = run_clocks(schedule, cost, sends == "rendezvous")
    return Simulation(schedule, tuple(map(tuple, starts)), tuple(map(tuple, ends)))


def _peak(program, grows: Callable[[Instruction], bool], shrinks: Callable[[Instruction], bool]) -> int:
    """The most that is there at once; an instruction that shrinks the count does so at its end."""
    live = peak = 0
    for i in program:
        live += grows(i)
        peak = max(peak, live)
        live -= shrinks(i)
    return peak
