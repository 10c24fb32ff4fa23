"""What a step sends over the data-parallel ranks, in bytes of payload, before anything is sent. Pure.

With Ψ elements, padding included, and m micro-batches (payload as in mpu/traffic.py, which a ring multiplies by (n-1)/n, an
all-reduce by twice that):

    stage 0   all-reduce Ψ
    stage 1   reduce-scatter Ψ, all-gather Ψ
    stage 2   reduce-scatter m Ψ (once where whole gradients are kept), all-gather Ψ
    stage 3   reduce-scatter as stage 2, all-gather 2 m Ψ (Ψ where the stage is pinned), less what `gathering` spares

For m = 1 these are the 2Ψ, 2Ψ, 2Ψ and 3Ψ of Rajbhandari et al. 2020, section 7. Gathers are counted by letting
`LayerGathering` run over units that only count.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from .gathering import LayerGathering
from .sets import SetPlan


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
    units = [CountedUnit(size) for size in sizes]
    of = lambda lists: [[units[i] for i in indices] for indices in lists]
    gathering = LayerGathering(of(needs), of(in_backward), prefetch, close=lambda layer: None)
    if pinned:
        gathering.pin()
    for _ in range(microbatches):
        for backward, order in ((False, range(len(needs))), (True, reversed(range(len(needs))))):
            for layer in order:
                gathering.enter(layer, backward)
                gathering.leave(layer, backward)
    return [unit.gathers for unit in units]


def predict_traffic(plans: Sequence[SetPlan], gathers: Sequence[Sequence[int]], *, microbatches: int, reduce_each: bool,
                    parameter_bytes: int, gradient_bytes: int) -> Counter:
    """Payload bytes of a step by operation, over the data-parallel ranks; of sets over groups of one, none.

    gathers: for each plan how often each of its units is gathered, empty where it has none
    """
    sent: Counter = Counter()
    for plan, counts in zip(plans, gathers):
        layout = plan.layout
        if layout.shards == 1:
            continue
        gradients = 0 if plan.frozen else layout.numel * gradient_bytes
        if plan.policy.optimizer is None:
            sent["all_reduce"] += gradients
            continue
        sent["reduce_scatter"] += gradients * (microbatches if plan.policy.gradient and reduce_each else 1)
        if not plan.units:
            sent["all_gather"] += layout.numel * parameter_bytes
        for (_, first, stop), count in zip(plan.units, counts):
            sent["all_gather"] += count * (layout.buckets[stop - 1].stop - layout.buckets[first].start) * parameter_bytes
    return sent
