"""What a step sends over the data-parallel ranks, in bytes of payload, before anything is sent. Pure.

With Ψ elements, padding included, and m micro-batches (payload as in mpu/traffic.py, which a ring multiplies by (n-1)/n, an
all-reduce by twice that):

    stage 0   all-reduce Ψ
    stage 1   reduce-scatter Ψ, all-gather Ψ
    stage 2   reduce-scatter m Ψ (once where whole gradients are kept), all-gather Ψ
    stage 3   reduce-scatter as stage 2, all-gather 2 m Ψ (Ψ where the stage is pinned), less what `gathering` spares
              over an inner group of h; then over the outer one reduce-scatter 1/h of that, and all-gather Ψ/h

Gradients count in the dtype that they travel in. For m = 1 these are the 2Ψ, 2Ψ, 2Ψ and 3Ψ of Rajbhandari et al. 2020,
section 7. Gathers are counted by letting `LayerGathering` run over units that only count.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ..mpu.group import Group
from ..mpu.traffic import Traffic
from .data_groups import Hierarchy
from .gathering import LayerGathering
from .set_plan import SHARED, SetPlan
from .units import Unit


@dataclass
class Meter:
    """Elements that are whole: now, and the most there ever were."""

    now: int = 0
    most: int = 0

    def add(self, elements: int) -> None:
        self.now += elements
        self.most = max(self.most, self.now)


@dataclass(eq=False)
class CountedUnit:
    """A unit that is never there; counts how often it was gathered."""

    numel: int
    whole: Meter = field(default_factory=Meter)
    gathers: int = 0
    is_free: bool = True
    claims: set = field(default_factory=set)

    def fetch(self) -> None:
        pass

    def start(self) -> None:
        if self.is_free:
            self.gathers += 1
            self.is_free = False
            self.whole.add(self.numel)

    def wait(self) -> None:
        pass

    def free(self) -> None:
        if not self.is_free:
            self.is_free = True
            self.whole.add(-self.numel)


def in_turn(stages: Iterable[int], microbatches: int, pinned: bool) -> Iterator[tuple[str, int]]:
    """The moments of a step in which each micro-batch goes forward and back through one stage, then the next stage follows.

    How often a unit of a single stage is gathered is the same in every order that a schedule may have.
    """
    for stage in stages:
        yield from [("pin", stage)] * pinned
        for _ in range(microbatches):
            yield from (("forward", stage), ("backward", stage))
        yield from [("unpin", stage)] * pinned


def count_gathers(gatherings: Mapping[int, LayerGathering], moments: Iterable[tuple[str, int]]) -> dict[Unit, int]:
    """How often each unit is gathered in a step. gatherings: by stage. moments: ("pin", "forward", "backward" or "unpin",
    stage) in the order of the rank's program."""
    return foresee_gathers(gatherings, moments)[0]


def foresee_gathers(gatherings: Mapping[int, LayerGathering],
                    moments: Iterable[tuple[str, int]]) -> tuple[dict[Unit, int], int]:
    """(`count_gathers`, the most elements that are whole at a time)."""
    whole = Meter()
    counted = {unit: CountedUnit(unit.numel, whole) for gathering in gatherings.values() for unit in gathering.units}
    of = lambda lists: [[counted[unit] for unit in units] for units in lists]
    plans = {stage: LayerGathering(of(g.needs), of(g.in_backward), g.prefetch, stage=stage) for stage, g in gatherings.items()}
    for moment, stage in moments:
        if (gathering := plans.get(stage)) is None:
            continue
        if moment in ("pin", "unpin"):
            getattr(gathering, moment)()
            continue
        order = range(len(gathering.needs))
        for layer in order if moment == "forward" else reversed(order):
            gathering.enter(layer, moment == "backward")
            gathering.leave(layer, moment == "backward")
    return {unit: count.gathers for unit, count in counted.items()}, whole.most


def predict_traffic(plans: Sequence[SetPlan], ranks: Sequence[Hierarchy], gathers: Sequence[Sequence[int]], *,
                    microbatches: int, reduce_each: bool, parameter_bytes: int, gradient_bytes: int) -> Traffic:
    """What a step sends over the data-parallel ranks; over groups of one, nothing.

    ranks: of each plan
    gathers: for each plan how often each of its units is gathered, empty where it has none
    """
    sent = Traffic()

    def add(operation: str, group: Group, elements: int, size: int, calls: int) -> None:
        if group.size > 1 and elements:
            sent.add(operation, group.axes, group.size, elements * size, calls)

    for plan, where, counts in zip(plans, ranks, gathers):
        layout, inner, outer = plan.layout, where.inner, where.outer
        part, buckets = layout.numel // inner.size, len(layout.buckets)
        gradients = 0 if plan.frozen else layout.numel
        if plan.policy.optimizer is None:
            add("all_reduce", where.data, gradients, gradient_bytes, buckets)
            continue
        cycles = microbatches if plan.policy.gradient and reduce_each and plan.stage != SHARED else 1
        add("reduce_scatter", inner, cycles * gradients, gradient_bytes, cycles * buckets)
        add("reduce_scatter", outer, cycles * gradients // inner.size, gradient_bytes, cycles * buckets)
        add("all_gather", outer, part, parameter_bytes, buckets)
        if not plan.units:
            add("all_gather", inner, layout.numel, parameter_bytes, buckets)
        for (_, first, stop), count in zip(plan.units, counts):
            numel = layout.buckets[stop - 1].stop - layout.buckets[first].start
            add("all_gather", inner, count * numel, parameter_bytes, count * (stop - first))
    return sent
