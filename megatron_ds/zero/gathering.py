"""`LayerGathering`: when parameters are whole (ZeRO 3), for the layers of one pipeline stage.

Layers are used in the order of their list, in backward in reverse; nothing is traced.

    enter(i)         gather layer i and wait for it; start the next layers (backward: the previous), as far as
                     prefetch allows
    leave(i)         free what no other layer has claimed; in backward, also reduce the gradients that are
                     complete with it
    keep_gathered    all layers stay whole until release_gathered

A layer may need units of other layers: a head that shares the embedding's weight claims the embedding's unit,
also if the two are on different stages of one rank. Collectives start in these calls only, so their order is
the same on all ranks.

Two gathers are avoided. The last layer stays whole after its forward, because the next backward of this stage
begins with it. A layer whose backward does not read its weights (an embedding) is not gathered for it. So a
step of m micro-batches gathers each layer 2m times, the last one m times, an embedding m times, for any
schedule; a weight shared by embedding and head 2m times like the others.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import nn

from .parameter_set import ParameterSet
from .set_plan import SHARED, ParameterUse, SetPlan
from .units import GatherUnit

KEPT = "kept"       # the claim of a stage that keeps all its layers gathered


class LayerGathering:
    """needs: the units that each layer uses. in_backward: the units that the backward of each layer reads.

    prefetch  elements that may be on their way for layers ahead; None: one layer ahead, of any size
    close     called with a layer when its backward has ended
    stage     of the pipeline: several stages can claim one unit
    """

    def __init__(self, needs: Sequence[Sequence[GatherUnit]], in_backward: Sequence[Sequence[GatherUnit]],
                 prefetch: int | None, close: Callable[[int], None] = lambda layer: None, stage: int = 0):
        self.needs, self.in_backward, self.prefetch = needs, in_backward, prefetch
        self.close, self.stage = close, stage
        self._keeps_all = False

    @property
    def units(self) -> list[GatherUnit]:
        """Of all layers, each once, in forward order."""
        return list(dict.fromkeys(unit for layer in self.needs for unit in layer))

    def enter(self, layer: int, backward: bool) -> None:
        """Before the forward or backward of a layer: its parameters are whole on return. Collective."""
        needs = self.in_backward if backward else self.needs
        self._claim(layer, needs)
        if not self._keeps_all:
            self._claim_ahead(layer, backward, needs)
        for unit in needs[layer]:
            unit.wait()

    def leave(self, layer: int, backward: bool) -> None:
        """After the forward or backward of a layer. Collective."""
        if backward:
            self._release(layer)
            self.close(layer)
        elif layer + 1 < len(self.needs):
            self._release(layer)

    def keep_gathered(self) -> None:
        """Begin to gather everything, in forward order; it stays whole until `release_gathered`."""
        self._keeps_all = True
        for units in self.needs:
            for unit in units:
                unit.claims.add((self.stage, KEPT))
                unit.start()

    def wait(self) -> None:
        """All units whose gather was started are whole on return."""
        for units in self.needs:
            for unit in units:
                unit.wait()

    def release_gathered(self) -> None:
        """End of `keep_gathered`: free everything."""
        self._keeps_all = False
        self.reset()

    def reset(self) -> None:
        """Remove all claims of this stage, also after a step that failed."""
        for unit in self.units:
            unit.claims -= {claim for claim in unit.claims if claim[0] == self.stage}
            if not unit.claims:
                unit.free()

    def _claim(self, layer: int, needs: Sequence[Sequence[GatherUnit]]) -> None:
        for unit in needs[layer]:
            unit.claims.add((self.stage, layer))
            unit.start()

    def _claim_ahead(self, layer: int, backward: bool, needs: Sequence[Sequence[GatherUnit]]) -> None:
        ahead = range(layer - 1, -1, -1) if backward else range(layer + 1, len(needs))
        under_way = 0
        for i in ahead:
            full = under_way > 0 if self.prefetch is None else under_way + _numel(needs[i]) > self.prefetch
            if full:
                for unit in needs[i]:       # not gathered yet, but offloaded shards are fetched
                    unit.fetch()
                return
            under_way += _numel(needs[i])
            self._claim(i, needs)

    def _release(self, layer: int) -> None:
        for unit in self.needs[layer]:
            unit.claims.discard((self.stage, layer))
            if not unit.claims:
                unit.free()


def _numel(units: Sequence[GatherUnit]) -> int:
    return sum(unit.numel for unit in units)


def make_gathering(use: ParameterUse, stage: int, sets: Sequence[ParameterSet],
                   prefetch: int | None) -> LayerGathering:
    """The gathering of a stage, which also reduces gradients when a layer is left in backward."""
    gathered = [s for s in sets if s.plan.units and s.plan.stage in (stage, SHARED)]
    units = units_by_parameter((s.plan, s.parameters, s.store.units) for s in gathered)
    reduced = [s for s in gathered if s.plan.stage == stage and s.buckets is not None]

    def close(layer: int) -> None:
        for s in reduced:
            for unit in s.store.units:
                if unit.layer == layer:
                    s.buckets.close(unit.last_bucket)

    return gathering_over(use, stage, units, prefetch, close)


def units_by_parameter(sets: Iterable[tuple[SetPlan, Sequence[nn.Parameter], Sequence[GatherUnit]]]
                       ) -> dict[nn.Parameter, GatherUnit]:
    """The unit with which each parameter is gathered. sets: (plan, its parameters by slot, its units in order)."""
    return {p: units[i] for plan, parameters, units in sets for p, slot in zip(parameters, plan.layout.slots)
            for i, (_, first, stop) in enumerate(plan.units) if first <= slot.bucket < stop}


def gathering_over(use: ParameterUse, stage: int, units: Mapping[nn.Parameter, GatherUnit], prefetch: int | None,
                   close: Callable[[int], None] = lambda layer: None) -> LayerGathering:
    """The gathering of a stage over the units of a run, or over units that only count, for a plan."""
    needs = [list(dict.fromkeys(units[p] for p in layer if p in units)) for layer in use.layers[stage]]
    in_backward = [[] if (stage, i) in use.not_read_in_backward else wanted for i, wanted in enumerate(needs)]
    return LayerGathering(needs, in_backward, prefetch, close, stage)
