"""Zero-bubble schedules: weight halves of backward are delayed and fill idle time. Qi et al. 2024
(arXiv:2401.10241).

A neighbour waits only for the gradient of its output, I. The gradient of the weights, W, may come at any
later time. ZB-H1 and ZB-H2 are of section 2:

    ZB-H1    as many forwards ahead as 1F1B     bubble (p - 1) (F + I - W), a third of 1F1B's if F = I = W;
                                                every rank keeps min(m, p) micro-batches alive
    ZB-H2    nearly twice as many               bubble (p - 1) (F + I - 2 W), none if F = I = W;
                                                every rank keeps min(m, 2 p - 1) micro-batches alive

Rank r has `ahead` forwards more than I, and `behind` I more than W; the sum is the number of micro-batches it
keeps alive. A late rank uses the memory that it does not need for forwards to delay W. ZB-H2 with m < 2 p - 1
is a schedule between the two.

zb-auto and zb-v are orders found by a search for given costs (sections 3.1 and 6). Both use one event loop:
ranks act in the order of time, and a rank that is free asks a rule for its next computation. The rules are
ours; as in the paper, an order is built for several settings of a rule, and the best is returned.

zb-auto has one stage per rank. A free rank takes the first of these that holds:

    I    its gradient has arrived
    F    its activation has arrived, memory admits another, and a gradient whose arrival is known would wait
         for at most `delay` of the length of F; `first_delay` for the first gradient, whose delay adds up
         over all ranks
    W    one is due, and nothing else arrives within `gap` of its length; so also when memory is full
    wait until the next arrival

Weight halves are delayed as long as memory allows, and fill idle time, mostly at the end. The arrival of a
gradient is known when the next rank has begun to compute it, and that of the first one from the costs. A
micro-batch holds 1 between its F and its I, and `weight_share` of that between I and W (M_W / M_B in the
paper: what attention saves is not needed for weights).

zb-v gives each rank a stage near the start of the model and one near its end, so that gradients return early:

    stage s < p is on rank s, stage p + s on rank p - 1 - s: the model goes down the ranks and up again

The loss is on rank 0. Each rank keeps at most 2 p activations of half a rank's model alive, as much as 1F1B
keeps on rank 0, and hardly waits between its first and its last computation if F = I = W. A free rank takes
the first computation that is ready in the order: F of its later stage, F of its earlier one, I of its earlier
one, I of its later one, W of either. An F needs room; the earlier stage leaves room for one F of the later
one, which can therefore always proceed. (For equal costs this is the best of the 24 orders of these four: up
to 16 ranks, with m a multiple of p, it takes at most 6 units more than the minimum, p - 1 + 6 m.) For other
costs the rule is applied to their times, as it is and with W waiting if something else arrives within half
its length; the best of these orders and of that for equal costs is returned.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import product

from ...errors import ScheduleError
from ...pipeline.instruction import Instruction, Op, Program, Schedule, StageCosts
from ...pipeline.passes import add_transfers
from ...pipeline.schedules import schedule
from ...pipeline.simulate import Simulation, run_clocks


@schedule("zb-h1", peak=lambda p, m, v, rank: min(m, p))
def zb_h1(pipeline_size: int, num_microbatches: int, chunks: int = 1) -> Schedule:
    """Return a schedule in which every rank keeps as many micro-batches alive as rank 0 does in 1F1B."""
    return _schedule(pipeline_size, num_microbatches, more=0)


@schedule("zb-h2", peak=lambda p, m, v, rank: min(m, 2 * p - 1))
def zb_h2(pipeline_size: int, num_microbatches: int, chunks: int = 1) -> Schedule:
    """Return a schedule with nearly twice as many micro-batches alive as ZB-H1, and no bubble if F = I = W."""
    more = max(0, min(pipeline_size - 1, num_microbatches - pipeline_size))
    return _schedule(pipeline_size, num_microbatches, more)


def _schedule(p: int, m: int, more: int) -> Schedule:
    """Return the programs of all ranks. more: micro-batches alive in addition to those of ZB-H1, from 0 to p - 1."""
    programs = []
    last = p - 1
    for rank in range(p):
        # The early ranks get the larger parts of `more` as forwards, the late ones as weight halves.
        extra = more * (last - rank) // max(1, last)
        ahead = p - rank + extra
        behind = p + more - ahead
        programs.append(_program(rank, m, ahead, behind))
    return tuple(programs)


def _program(stage: int, m: int, ahead: int, behind: int) -> Program:
    """`ahead` forwards, then I, W, F in turn; the first `behind` weight halves are left to the end."""
    # Forwards that come before the first I.
    program = [Instruction(Op.F, stage, k) for k in range(min(m, ahead))]
    for k in range(m):
        program.append(Instruction(Op.I, stage, k))
        if k >= behind:
            program.append(Instruction(Op.W, stage, k - behind))
        if k + ahead < m:
            program.append(Instruction(Op.F, stage, k + ahead))
    # Weight halves that are left.
    left = range(max(0, m - behind), m)
    program += [Instruction(Op.W, stage, k) for k in left]
    return tuple(program)


EQUAL = StageCosts()
# The settings of the rules for which an order is built.
AUTO_DELAYS = (0.25, 0.75)
AUTO_FIRST_DELAYS = (0.0, 0.5)
AUTO_GAPS = (0.0, 0.75)
V_GAPS = (0.0, 0.5)
SEARCHED = (Op.F, Op.I, Op.W)
TIMED = (*SEARCHED, Op.SEND_ACT, Op.SEND_GRAD)
NEVER = float("inf")
SAME_TIME = 1e-9  # sums of the same times in another order differ by rounding

Choice = tuple[Op, int] | None  # (operation, stage) to begin now; None: wait
# (search, rank, now) → (choice, time of the next look)
Rule = Callable[["_Search", int, float], tuple[Choice, float]]


@schedule(
    "zb-auto",
    peak=lambda p, m, v, rank: min(m, p),
    options=("costs", "memory_limit"),
)
def zb_auto(
    pipeline_size: int,
    num_microbatches: int,
    chunks: int = 1,
    *,
    costs: StageCosts = EQUAL,
    memory_limit: float | None = None,
    weight_share: float = 1.0,
) -> Schedule:
    """Return the order in which the slowest rank takes the shortest time from its first to its last computation.

    costs           times of F, I and W of each stage, and of transfers

    memory_limit    activations of one micro-batch that a rank may keep; None: pipeline_size, as for 1F1B
    weight_share    part of an activation that W still needs, from 0 to 1
    """
    p = pipeline_size
    m = num_microbatches
    limit = p if memory_limit is None else memory_limit
    if not limit >= 1 or not 0 <= weight_share <= 1:
        raise ScheduleError(
            f"schedule 'zb-auto' cannot keep at most {limit} activations with a weight share "
            f"of {weight_share}: one micro-batch must fit. Use a memory limit of 1 or more "
            f"(1F1B's rank 0 keeps {p}; twice that leaves almost no bubble) and a share from "
            "0 to 1."
        )
    # An order for each setting, of which the best by the times of its search stays.
    first_gradients = _first_gradients(p, costs)
    found = []
    for knobs in product(AUTO_FIRST_DELAYS, AUTO_DELAYS, AUTO_GAPS):
        rule = _AutoRule(limit, weight_share, first_gradients, *knobs)
        search = _Search(range(p), m, costs, rule)
        found.append((search.score, search.schedule))
    _, best = min(found, key=lambda entry: entry[0])
    orders = [best]
    # The fixed orders, where memory admits them, are candidates too.
    if min(m, p) <= limit:
        orders.append(zb_h1(p, m))
    if min(m, 2 * p - 1) <= limit:
        orders.append(zb_h2(p, m))
    return min(orders, key=lambda order: score_of(order, p, costs))


@schedule(
    "zb-v",
    chunks=(2,),
    peak=lambda p, m, v, rank: min(2 * m, 2 * p),
    options=("costs",),
)
def zb_v(
    pipeline_size: int,
    num_microbatches: int,
    chunks: int = 2,
    *,
    costs: StageCosts = EQUAL,
) -> Schedule:
    """The model goes down the ranks and up again: stage s < p is on rank s, stage p + s on rank p - 1 - s.

    costs: times of F, I and W of each stage, and of transfers
    """
    p = pipeline_size
    m = num_microbatches
    homes = [*range(p), *reversed(range(p))]
    # The order for equal costs is a candidate for all others.
    rule = partial(_v_rule, gap=0.0)
    equal = _Search(homes, m, EQUAL, rule).schedule
    if costs == EQUAL:
        return equal
    orders = [equal]
    for gap in V_GAPS:
        rule = partial(_v_rule, gap=gap)
        orders.append(_Search(homes, m, costs, rule).schedule)
    return min(orders, key=lambda order: score_of(order, 2 * p, costs))


def score_of(
    order: Schedule, num_stages: int, costs: StageCosts
) -> tuple[float, float]:
    """(longest time of a rank from first to last computation, time of all ranks together); less is better."""
    lowered = add_transfers(order, num_stages)
    clocks = run_clocks(lowered, costs.of)
    simulation = Simulation(lowered, *clocks)
    return max(simulation.rank_spans), simulation.span


class _Search:
    """One order, built in the order of time.

    homes    stage → rank
    cost     operation → stage → time
    done     operation → stage → micro-batches that have begun it; they come in their order
    arrived  F or I → stage → when each micro-batch may begin it, as far as known
    clock    rank → end of its last computation
    """

    def __init__(self, homes: Sequence[int], m: int, costs: StageCosts, rule: Rule):
        stages = range(len(homes))
        ranks = range(max(homes) + 1)
        self.homes = homes
        # What is known of each operation at each stage. The first stage has all its inputs.
        self.cost: dict[Op, list[float]] = {}
        for op in TIMED:
            self.cost[op] = [costs.of(Instruction(op, s, 0)) for s in stages]
        self.done = {op: [0 for _ in stages] for op in SEARCHED}
        self.arrived: dict[Op, list[list[float]]] = {}
        for op in (Op.F, Op.I):
            self.arrived[op] = [[] for _ in stages]
        self.arrived[Op.F][0] = [0.0] * m
        # What each rank has begun, and when.
        self.programs: list[list[Instruction]] = [[] for _ in ranks]
        self.start = [NEVER for _ in ranks]
        self.clock = [0.0 for _ in ranks]
        # The event loop: ranks act in the order of time, one computation after the other.
        # (time, rank that looks for its next choice)
        self._events = [(0.0, rank) for rank in ranks]
        heapify(self._events)
        while self._events:
            now, rank = heappop(self._events)
            if now < self.clock[rank]:
                continue  # busy; it looks again when it is free
            choice, later = rule(self, rank, now)
            if choice is not None:
                self._begin(rank, *choice, now)
            elif later < NEVER:
                heappush(self._events, (later, rank))

    @property
    def schedule(self) -> Schedule:
        """The order that was found."""
        return tuple(map(tuple, self.programs))

    @property
    def score(self) -> tuple[float, float]:
        """`score_of` the order, from the times computed while it was built."""
        spans = [end - start for start, end in zip(self.start, self.clock)]
        return max(spans), max(self.clock)

    def arrival(self, op: Op, stage: int) -> float:
        """Return when the next micro-batch may begin F or I at a stage, NEVER if that is not known yet.

        An I waits for its forward, too.
        """
        k = self.done[op][stage]
        times = self.arrived[op][stage]

        if k >= len(times):
            return NEVER
        if op is Op.I and k >= self.done[Op.F][stage]:
            return NEVER
        return times[k]

    def _begin(self, rank: int, op: Op, stage: int, now: float) -> None:
        """Record a computation that begins now, and when its result arrives."""
        microbatch = self.done[op][stage]
        self.programs[rank].append(Instruction(op, stage, microbatch))
        self.done[op][stage] += 1
        # The rank is busy until the end, and then looks for its next choice.
        end = now + self.cost[op][stage]
        self.start[rank] = min(self.start[rank], now)
        self.clock[rank] = end
        heappush(self._events, (end, rank))
        # The loss turns back at the last stage; W and the first stage's I have no receiver.
        last = len(self.homes) - 1
        if op is Op.F and stage == last:
            self.arrived[Op.I][last].append(end)
            return
        if op is Op.F:
            target = stage + 1
            send = Op.SEND_ACT
        elif op is Op.I and stage:
            target = stage - 1
            send = Op.SEND_GRAD
        else:
            return
        home = self.homes[target]
        transfer = self.cost[send][stage] if home != rank else 0
        self.arrived[op][target].append(end + transfer)
        heappush(self._events, (now, home))  # an arrival there is known now


@dataclass(frozen=True)
class _AutoRule:
    """The rule of zb-auto at the top. first_gradients: rank → earliest arrival of its first gradient."""

    limit: float
    weight_share: float
    first_gradients: Sequence[float]
    first_delay: float
    delay: float
    gap: float

    def __call__(self, search: _Search, rank: int, now: float) -> tuple[Choice, float]:
        """Return the next computation of a rank at time `now`, or when it looks again."""
        forwards = search.done[Op.F][rank]
        inputs = search.done[Op.I][rank]
        weights = search.done[Op.W][rank]
        has_forward = inputs < forwards
        # I, if its gradient has arrived. That of the first is known from the costs.
        known = search.arrived[Op.I][rank]
        gradient = NEVER
        if inputs < len(known):
            gradient = known[inputs]
        elif inputs == 0:
            gradient = self.first_gradients[rank]
        if has_forward and inputs < len(known) and gradient <= now:
            return (Op.I, rank), NEVER
        # F, if memory admits another, and if it does not delay a gradient for too long.
        activation = NEVER
        activations = search.arrived[Op.F][rank]
        halves = self.weight_share * (inputs - weights)
        live = forwards - inputs + halves
        has_memory = live + 1 <= self.limit + 1e-9
        if forwards < len(activations) and has_memory:
            activation = activations[forwards]
        foreseen = gradient if gradient > now and has_forward else NEVER
        delay = self.delay if inputs else self.first_delay
        in_time = now + (1 - delay) * search.cost[Op.F][rank]
        if activation <= now and in_time <= foreseen:
            return (Op.F, rank), NEVER
        # W, if nothing else arrives soon.
        later = foreseen
        if activation > now:
            later = min(later, activation)
        wait = self.gap * search.cost[Op.W][rank]
        if weights < inputs and later - now >= wait:
            return (Op.W, rank), NEVER
        return None, later


def _first_gradients(p: int, costs: StageCosts) -> list[float]:
    """Return when the first gradient reaches each rank if no rank delays it."""
    at = lambda op: [costs.of(Instruction(op, stage, 0)) for stage in range(p)]
    input_grad = at(Op.I)
    grad_transfer = at(Op.SEND_GRAD)
    arrivals = [0.0] * p
    # The first micro-batch goes down all ranks; its gradient comes back from the last one.
    act_transfer = at(Op.SEND_ACT)[:-1]
    clock = sum(at(Op.F)) + sum(act_transfer)
    for rank in reversed(range(p)):
        arrivals[rank] = clock
        clock += input_grad[rank] + grad_transfer[rank]
    return arrivals


def _v_rule(
    search: _Search, rank: int, now: float, *, gap: float
) -> tuple[Choice, float]:
    """Return the rule of zb-v at the top; W waits if something else arrives within `gap` of its length."""
    p = len(search.homes) // 2
    done = search.done
    early = rank
    late = 2 * p - 1 - rank
    begun = done[Op.F][early] + done[Op.F][late]
    ended = done[Op.W][early] + done[Op.W][late]
    live = begun - ended
    # F needs room: of the earlier stage, for one F of the later stage in addition.
    wanted = []
    if live < 2 * p:
        wanted.append((Op.F, late))
    if live < 2 * p - 1:
        wanted.append((Op.F, early))
    wanted += [(Op.I, early), (Op.I, late)]
    # The first of the order whose input is there.
    times = [search.arrival(op, stage) for op, stage in wanted]
    latest = now + SAME_TIME
    ready = (what for what, time in zip(wanted, times) if time <= latest)
    choice = next(ready, None)
    soonest = min(times)
    # W, of the stage that is further behind, if nothing else arrives soon.
    if choice is None:
        due = [s for s in (late, early) if done[Op.W][s] < done[Op.I][s]]
        stage = min(due, key=lambda s: done[Op.W][s], default=None)
        if stage is None:
            return None, soonest
        wait = gap * search.cost[Op.W][stage]
        if soonest - now >= wait:
            choice = Op.W, stage
    return choice, soonest
