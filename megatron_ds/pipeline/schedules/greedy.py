"""The automatic schedule of Zero Bubble: an order for given costs under a given limit of memory. Qi et al. 2024
(arXiv:2401.10241), section 3.1.

As there, an order is built greedily with a few knobs, for all settings of the knobs, and the best is taken. The rules are
ours. Ranks act in the order of time; one that is free takes the first of these that holds:

    I    if its gradient is there
    F    if its activation is there, memory admits another, and it would not keep a gradient, whose arrival can be
         foreseen, waiting for more than `delay` of its own length; `first_delay` for the first gradient, whose delay adds up
         on its way through all ranks
    W    if one is due, and nothing else will be there for `gap` of its length; so also when memory is full
    wait for whatever comes next

Weight halves are thus put off as long as memory allows, and fill what would be idle, at the end above all. A gradient can be
foreseen when the rank behind has begun it, and the first one of all from the costs. Between its F and its I a micro-batch
holds 1, between I and W `weight_share` of that (the paper's M_W / M_B: what attention saves is not needed for weights).
"""

from heapq import heapify, heappop, heappush
from itertools import product

from ...errors import ScheduleError
from ..costs import StageCosts
from ..instruction import Instruction, Op, Program, Schedule
from .family import schedule
from .judge import ALIKE, judge
from .zero_bubble import zb_h1, zb_h2

DELAYS = (0.25, 0.75)
FIRST_DELAYS = (0.0, 0.5)
GAPS = (0.0, 0.75)
NEVER = float("inf")


@schedule("zb-auto", peak=lambda p, m, v, rank: min(m, p), options=("costs", "memory_limit"))
def zb_auto(pipeline_size: int, num_microbatches: int, chunks: int = 1, *, costs: StageCosts = ALIKE,
            memory_limit: float | None = None, weight_share: float = 1.0) -> Schedule:
    """The order in which the rank that takes longest, from its first to its last computation, takes the shortest time; among
    those with the same, the one that is through first.

    memory_limit    activations of one micro-batch that a rank may keep; None: pipeline_size, as 1F1B needs on rank 0
    weight_share    part of an activation that W still needs, from 0 to 1
    """
    p, m = pipeline_size, num_microbatches
    limit = p if memory_limit is None else memory_limit
    if not limit >= 1 or not 0 <= weight_share <= 1:
        raise ScheduleError(f"schedule 'zb-auto' cannot keep at most {limit} activations with a weight share of "
                            f"{weight_share}: one micro-batch must fit. Use a memory limit of 1 or more (1F1B's rank 0 keeps "
                            f"{p}; twice that leaves almost no bubble) and a share from 0 to 1.")
    tries = [_Greedy(p, m, costs, limit, weight_share, *knobs) for knobs in product(FIRST_DELAYS, DELAYS, GAPS)]
    found = [(greedy.judgement(), greedy.schedule()) for greedy in tries]
    for known, needed in ((zb_h1, min(m, p)), (zb_h2, min(m, 2 * p - 1))):
        if needed <= limit:
            order = known(p, m)
            found.append((judge(order, p, costs), order))
    return min(found, key=lambda entry: entry[0])[1]


class _Greedy:
    """One order, built by the rules on top; `stage` and rank are the same number here."""

    def __init__(self, p: int, m: int, costs: StageCosts, limit: float, weight_share: float,
                 first_delay: float, delay: float, gap: float):
        at = lambda op: [costs.of(Instruction(op, stage, 0)) for stage in range(p)]
        self.p, self.m, self.limit, self.weight_share = p, m, limit, weight_share
        self.first_delay, self.delay, self.gap = first_delay, delay, gap
        self.forward, self.input_grad, self.weight_grad = at(Op.F), at(Op.I), at(Op.W)
        self.act_transfer, self.grad_transfer = at(Op.SEND_ACT), at(Op.SEND_GRAD)
        self.done = {op: [0] * p for op in (Op.F, Op.I, Op.W)}             # rank → micro-batches through with it
        self.activation = [[0.0] * m if rank == 0 else [] for rank in range(p)]      # when they arrive, as far as foreseen
        self.gradient: list[list[float]] = [[] for _ in range(p)]
        self.first_gradient = self._first_gradients()
        self.order: list[list[Op]] = [[] for _ in range(p)]
        self.start, self.clock = [NEVER] * p, [0.0] * p
        self._run()

    def judgement(self) -> tuple[float, float]:
        return max(end - start for start, end in zip(self.start, self.clock)), max(self.clock)

    def schedule(self) -> Schedule:
        return tuple(_number(rank, order) for rank, order in enumerate(self.order))

    def _first_gradients(self) -> list[float]:
        """When the first gradient reaches each rank, if nothing keeps it waiting."""
        arrivals, clock = [0.0] * self.p, sum(self.forward) + sum(self.act_transfer[:-1])
        for rank in reversed(range(self.p)):
            arrivals[rank] = clock
            clock += self.input_grad[rank] + self.grad_transfer[rank]
        return arrivals

    def _run(self) -> None:
        """Whatever happens next, happens next: a heap of (time, rank that looks what it can do)."""
        events = [(0.0, rank) for rank in range(self.p)]
        heapify(events)
        while events:
            now, rank = heappop(events)
            if now < self.clock[rank]:
                continue                                                   # it is busy, and looks again when it is free
            op, later = self._choose(rank, now)
            if op is None:
                if later < NEVER:
                    heappush(events, (later, rank))
                continue
            neighbour = self._do(rank, op, now)
            heappush(events, (self.clock[rank], rank))
            if 0 <= neighbour < self.p:
                heappush(events, (now, neighbour))                         # something can be foreseen there now

    def _choose(self, rank: int, now: float) -> tuple[Op | None, float]:
        """(what the rank does now, or None; when it looks again if nobody wakes it)"""
        forwards, inputs, weights = (self.done[op][rank] for op in (Op.F, Op.I, Op.W))
        gradient, activation = self._gradient(rank, inputs), NEVER
        if inputs < forwards and inputs < len(self.gradient[rank]) and gradient <= now:
            return Op.I, NEVER
        live = forwards - inputs + self.weight_share * (inputs - weights)
        if forwards < len(self.activation[rank]) and live + 1 <= self.limit + 1e-9:
            activation = self.activation[rank][forwards]
        foreseen = gradient if gradient > now and inputs < forwards else NEVER
        delay = self.delay if inputs else self.first_delay
        if activation <= now and now + (1 - delay) * self.forward[rank] <= foreseen:
            return Op.F, NEVER
        later = min(foreseen, activation if activation > now else NEVER)
        if weights < inputs and later - now >= self.gap * self.weight_grad[rank]:
            return Op.W, NEVER
        return None, later

    def _gradient(self, rank: int, microbatch: int) -> float:
        if microbatch < len(self.gradient[rank]):
            return self.gradient[rank][microbatch]
        return self.first_gradient[rank] if microbatch == 0 else NEVER

    def _do(self, rank: int, op: Op, now: float) -> int:
        """Take note of a computation that begins now; returns the rank that waits for what it makes."""
        self.order[rank].append(op)
        self.done[op][rank] += 1
        self.start[rank] = min(self.start[rank], now)
        if op is Op.W:
            self.clock[rank] = now + self.weight_grad[rank]
            return -1
        if op is Op.I:
            self.clock[rank] = end = now + self.input_grad[rank]
            if rank:
                self.gradient[rank - 1].append(end + self.grad_transfer[rank])
            return rank - 1
        self.clock[rank] = end = now + self.forward[rank]
        if rank == self.p - 1:
            self.gradient[rank].append(end)
        else:
            self.activation[rank + 1].append(end + self.act_transfer[rank])
        return rank + 1


def _number(rank: int, order: list[Op]) -> Program:
    """Each operation takes the micro-batches as they come."""
    counts = dict.fromkeys((Op.F, Op.I, Op.W), 0)
    program = []
    for op in order:
        program.append(Instruction(op, rank, counts[op]))
        counts[op] += 1
    return tuple(program)
