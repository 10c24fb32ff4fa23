"""ZB-V: a rank holds a stage near the start of the model and one near its end, so that gradients are soon back. Qi et al. 2024
(arXiv:2401.10241), section 6.

    stage s < p lives on rank s, stage p + s on rank p - 1 - s: the model goes down the ranks and up again

The loss is on rank 0. Each rank keeps at most 2 p activations of half a rank's model alive, as much as 1F1B keeps on rank 0,
and hardly ever waits between its first and its last computation if F = I = W.

The order is found by a greedy rule. A rank that is free takes, of what is ready, the computation that stands first here: F of
its later stage, F of its earlier one, I of its earlier one, I of its later one, W of either. An F must find room; the earlier
stage leaves room for one F of the later one, which can therefore always go on. (For equal costs this is the best of the 24
orders of these four: up to 16 ranks, with m a multiple of p, it takes at most 6 units more than the least, p - 1 + 6 m.)

For other costs the rule is applied to their times, as it is and with W waiting where something else is foreseen within half
its length; the best of these orders and of that for equal costs is taken.
"""

from heapq import heapify, heappop, heappush

from ..costs import StageCosts
from ..instruction import Instruction, Op, Schedule
from .family import schedule
from .judge import ALIKE, judge

GAPS = (0.0, 0.5)
NEVER = float("inf")
AT_ONCE = 1e-9                       # sums of the same times in another order are the same time


@schedule("zb-v", chunks=(2,), peak=lambda p, m, v, rank: min(2 * m, 2 * p), options=("costs",))
def zb_v(pipeline_size: int, num_microbatches: int, chunks: int = 2, *, costs: StageCosts = ALIKE) -> Schedule:
    p, m = pipeline_size, num_microbatches
    alike = _Greedy(p, m, ALIKE, 0.0).schedule()
    if costs == ALIKE:
        return alike
    orders = [alike, *(_Greedy(p, m, costs, gap).schedule() for gap in GAPS)]
    return min(orders, key=lambda order: judge(order, 2 * p, costs))


class _Greedy:
    """One order, built by the rule on top, in the order of time."""

    def __init__(self, p: int, m: int, costs: StageCosts, gap: float):
        stages = range(2 * p)
        self.p, self.m, self.gap = p, m, gap
        self.cost = {(op, s): costs.of(Instruction(op, s, 0)) for op in (Op.F, Op.I, Op.W, Op.SEND_ACT, Op.SEND_GRAD)
                     for s in stages}
        self.done = {(op, s): 0 for op in (Op.F, Op.I, Op.W) for s in stages}
        self.arrived: dict[tuple[Op, int], list[float]] = {(op, s): [] for op in (Op.F, Op.I) for s in stages}
        self.arrived[Op.F, 0] = [0.0] * m                                    # when F and I of each micro-batch may begin
        self.programs: list[list[Instruction]] = [[] for _ in range(p)]
        self.clock = [0.0] * p
        self.events = [(0.0, rank) for rank in range(p)]                    # (time, rank that looks what it can do)
        heapify(self.events)
        while self.events:
            now, rank = heappop(self.events)
            if now >= self.clock[rank]:                                     # else it is busy, and looks again when it is free
                self._act(rank, now)

    def schedule(self) -> Schedule:
        return tuple(map(tuple, self.programs))

    def _act(self, rank: int, now: float) -> None:
        early, late = rank, 2 * self.p - 1 - rank
        live = sum(self.done[Op.F, s] - self.done[Op.W, s] for s in (early, late))
        forwards = [(Op.F, late)] * (live < 2 * self.p) + [(Op.F, early)] * (live < 2 * self.p - 1)
        wanted = [*forwards, (Op.I, early), (Op.I, late)]
        times = [self._time(op, stage) for op, stage in wanted]
        choice = next((what for what, time in zip(wanted, times) if time <= now + AT_ONCE), None)
        soonest = min(times)
        if choice is None:
            waiting = [s for s in (late, early) if self.done[Op.W, s] < self.done[Op.I, s]]
            stage = min(waiting, key=lambda s: self.done[Op.W, s], default=None)
            if stage is not None and soonest - now >= self.gap * self.cost[Op.W, stage]:
                choice = Op.W, stage
        if choice is not None:
            self._do(rank, *choice, now)
        elif soonest < NEVER:
            heappush(self.events, (soonest, rank))

    def _time(self, op: Op, stage: int) -> float:
        """When the next micro-batch of this operation may begin at this stage, as far as foreseen."""
        k = self.done[op, stage]
        there = k < len(self.arrived[op, stage]) and (op is Op.F or k < self.done[Op.F, stage])
        return self.arrived[op, stage][k] if there else NEVER

    def _do(self, rank: int, op: Op, stage: int, now: float) -> None:
        self.programs[rank].append(Instruction(op, stage, self.done[op, stage]))
        self.done[op, stage] += 1
        self.clock[rank] = end = now + self.cost[op, stage]
        heappush(self.events, (end, rank))
        last = 2 * self.p - 1
        if op is Op.F and stage == last:
            self.arrived[Op.I, last].append(end)
        elif op is Op.F or op is Op.I and stage:
            send, target = (Op.SEND_ACT, stage + 1) if op is Op.F else (Op.SEND_GRAD, stage - 1)
            home = min(target, last - target)
            self.arrived[op, target].append(end + (self.cost[send, stage] if home != rank else 0))
            heappush(self.events, (now, home))                              # something can be foreseen there now
