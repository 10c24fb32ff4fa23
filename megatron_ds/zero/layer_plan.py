"""`LayerPlan`: which layers of which pipeline stage use which parameters (ZeRO 3), and the gathering that follows from it.

A rank may hold several stages, and stages may share a parameter: input and output embedding when both ends of the pipeline
are on one rank. Such a parameter belongs to no single stage (`SHARED`): its layers on every stage claim it, and its gradient
is reduced once, after the last backward of all of them.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import nn

from .gathering import LayerGathering
from .parameter_set import ParameterSet
from .set_plan import SHARED, SetPlan

U = TypeVar("U")


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
    """The gathering of `stage`'s layers. A bucket of gradients is reduced when backward leaves the layer that completes it."""
    gathered = [s for s in sets if s.plan.units and s.plan.stage in (stage, SHARED)]
    reduced = [s for s in gathered if s.plan.stage == stage and s.buckets is not None]

    def close(layer: int) -> None:
        for s in reduced:
            for unit in s.store.units:
                if unit.layer == layer:
                    s.buckets.close(unit.last_bucket)

    units = units_by_parameter((s.plan, s.parameters, s.store.units) for s in gathered)
    return gathering_over(plan, stage, units, close)


def units_by_parameter(sets: Iterable[tuple[SetPlan, Sequence[nn.Parameter], Sequence[U]]]) -> dict[nn.Parameter, U]:
    """The unit with which each gathered parameter comes. sets: (plan, its parameters by slot, its units in order)."""
    return {p: units[i] for plan, parameters, units in sets for p, slot in zip(parameters, plan.layout.slots)
            for i, (_, first, stop) in enumerate(plan.units) if first <= slot.bucket < stop}


def _ignore(layer: int) -> None:
    """Nothing is reduced where units only count."""


def gathering_over(plan: LayerPlan, stage: int, units: Mapping[nn.Parameter, U],
                   close: Callable[[int], None] = _ignore) -> LayerGathering:
    """The gathering of `stage`'s layers over `units`: those of a run, or such as only count."""
    needs = [list(dict.fromkeys(units[p] for p in layer if p in units)) for layer in plan.layers[stage]]
    in_backward = [[] if (stage, i) in plan.not_read_in_backward else wanted for i, wanted in enumerate(needs)]
    return LayerGathering(needs, in_backward, plan.prefetch, close, stage)


def unread_layers(stages: Mapping[int, Iterable[nn.Module]]) -> frozenset[tuple[int, int]]:
    """(stage, layer) of the layers whose backward does not read their weights."""
    return frozenset((stage, i) for stage, modules in stages.items() for i, module in enumerate(modules)
                     if not getattr(module, "weights_read_in_backward", True))
