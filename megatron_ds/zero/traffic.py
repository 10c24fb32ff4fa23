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

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..mpu.group import Group
from ..mpu.traffic import Traffic
from .gathering import LayerGathering
from .hierarchy import Hierarchy
from .sets import SetPlan
from .units import Unit


@dataclass(eq=False)
class CountedUnit:
    """A unit that is never there; counts how often it was gathered."""

    numel: int
    gathers: int = 0
    is_free: bool = True
    claims: set = field(default_factory=set)

    def fetch(self) -> None:
        pass

    def start(self) -> None:
        self.gathers += self.is_free
        self.is_free = False

    def wait(self) -> None:
        pass

    def free(self) -> None:
        self.is_free = True


def predict_gathers(needs: Sequence[Sequence[int]], in_backward: Sequence[Sequence[int]], sizes: Sequence[int],
                    prefetch: int | None, microbatches: int, pinned: bool = False) -> list[int]:
    """How often each unit is gathered in a step. needs, in_backward: for each layer, indices into `sizes`."""
    return foresee_gathers(needs, in_backward, sizes, prefetch, microbatches, pinned)[0]


def foresee_gathers(needs: Sequence[Sequence[int]], in_backward: Sequence[Sequence[int]], sizes: Sequence[int],
                    prefetch: int | None, microbatches: int, pinned: bool = False) -> tuple[list[int], int]:
    """(`predict_gathers`, the most elements that are whole at a time)."""
    units = [CountedUnit(size) for size in sizes]
    of = lambda lists: [[units[i] for i in indices] for indices in lists]
    gathering = LayerGathering(of(needs), of(in_backward), prefetch, close=lambda layer: None)
    if pinned:
        gathering.pin()
    most = 0
    for _ in range(microbatches):
        for backward, order in ((False, range(len(needs))), (True, reversed(range(len(needs))))):
            for layer in order:
                gathering.enter(layer, backward)
                most = max(most, sum(unit.numel for unit in units if not unit.is_free))
                gathering.leave(layer, backward)
    return [unit.gathers for unit in units], most


def count_gathers(gatherings: Iterable[LayerGathering], microbatches: int, pinned: bool) -> dict[Unit, int]:
    """`predict_gathers` for the units of real stages."""
    counts: dict[Unit, int] = {}
    for gathering in gatherings:
        units = gathering.units
        indices = lambda lists, units=units: [[units.index(unit) for unit in layer] for layer in lists]
        sizes = [unit.numel for unit in units]
        counts |= zip(units, predict_gathers(indices(gathering.needs), indices(gathering.in_backward), sizes,
                                             gathering.prefetch, microbatches, pinned))
    return counts


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
        cycles = microbatches if plan.policy.gradient and reduce_each else 1
        add("reduce_scatter", inner, cycles * gradients, gradient_bytes, cycles * buckets)
        add("reduce_scatter", outer, cycles * gradients // inner.size, gradient_bytes, cycles * buckets)
        add("all_gather", outer, part, parameter_bytes, buckets)
        if not plan.units:
            add("all_gather", inner, layout.numel, parameter_bytes, buckets)
        for (_, first, stop), count in zip(plan.units, counts):
            numel = layout.buckets[stop - 1].stop - layout.buckets[first].start
            add("all_gather", inner, count * numel, parameter_bytes, count * (stop - first))
    return sent
