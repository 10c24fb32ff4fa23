"""`LayerPlan`: which layers of which pipeline stage use which parameters (ZeRO 3), and the gathering that follows from it.

A rank may hold several stages, and stages may share a parameter: input and output embedding when both ends of the pipeline
are on one rank. Such a parameter belongs to no single stage (`SHARED`): its layers on every stage claim it, and its gradient
is reduced once, after the last backward of all of them.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from .gathering import LayerGathering
from .parameter_set import ParameterSet
from .set_plan import SHARED


@dataclass(frozen=True)
class LayerPlan:
    """What stage 3 must know of the model: which parameters each layer uses, in forward order, per pipeline stage here.

    not_read_in_backward  (stage, layer) of layers whose backward does not need their weights
    prefetch     elements on their way for layers ahead; None: one layer ahead
    persistence  smaller parameters stay whole on every rank; None: the smallest, a thousandth of all
    """

    layers: Mapping[int, Sequence[Sequence[nn.Parameter]]]
    not_read_in_backward: frozenset[tuple[int, int]] = frozenset()
    prefetch: int | None = None
    persistence: int | None = None

    def places(self) -> dict[nn.Parameter, tuple[int, int]]:
        """Parameter → (its stage or SHARED, the first layer there that uses it)."""
        found: dict[nn.Parameter, dict[int, int]] = defaultdict(dict)
        for stage, layers in self.layers.items():
            for i, layer in enumerate(layers):
                for p in layer:
                    found[p].setdefault(stage, i)
        return {p: next(iter(places.items())) if len(places) == 1 else (SHARED, 0) for p, places in found.items()}


def make_gathering(plan: LayerPlan, stage: int, sets: Sequence[ParameterSet]) -> LayerGathering:
    """Who gathers the parameters of `stage`'s layers, and reduces its gradients when a layer is left in backward."""
    gathered = [s for s in sets if s.plan.units and s.plan.stage in (stage, SHARED)]
    unit_of = {}
    for s in gathered:
        for unit in s.store.units:
            for p, slot in zip(s.parameters, s.plan.layout.slots):
                if unit.first_bucket <= slot.bucket <= unit.last_bucket:
                    unit_of[p] = unit
    needs = [list(dict.fromkeys(unit_of[p] for p in layer if p in unit_of)) for layer in plan.layers[stage]]
    reduced = [s for s in gathered if s.plan.stage == stage and s.buckets is not None]

    def close(layer: int) -> None:
        for s in reduced:
            for unit in s.store.units:
                if unit.layer == layer:
                    s.buckets.close(unit.last_bucket)

    in_backward = [[] if (stage, i) in plan.not_read_in_backward else units for i, units in enumerate(needs)]
    return LayerGathering(needs, in_backward, plan.prefetch, close, stage)
