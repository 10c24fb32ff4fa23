"""The layers of any module: the units that stage 3 gathers.

    element of a ModuleList, ModuleDict or Sequential     a layer, with all parameters inside
    any other module that owns parameters itself          a layer of these

An element that holds more than a quarter of the model, and contains lists, is divided like the rest. Layers
are in the order of registration, which should be that of the forward (module_gathering.py handles other
orders).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..zero.gathering import LayerGathering
from ..zero.units import Unit

LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
LARGE = 4       # an element with more than 1 / LARGE of the parameters is divided


@dataclass(frozen=True, eq=False)
class ModuleLayer:
    """`parameters` are gathered around the forward of `module`."""

    name: str
    module: nn.Module
    parameters: list[nn.Parameter]

    @property
    def read_in_backward(self) -> bool:
        """Whether its backward needs the parameters."""
        return not isinstance(self.module, nn.Embedding)


def find_layers(module: nn.Module) -> list[ModuleLayer]:
    """The layers; every parameter is in at least one. A module that stands in two places is one layer."""
    total = sum(p.numel() for p in module.parameters())
    found: dict[nn.Module, ModuleLayer] = {}
    for layer in _visit("", module, False, total):
        found.setdefault(layer.module, layer)
    return list(found.values())


def _visit(name: str, module: nn.Module, is_element: bool, total: int) -> Iterator[ModuleLayer]:
    is_list = isinstance(module, nn.ModuleList | nn.ModuleDict)
    if is_element and not is_list and not _is_divided(module, total):
        if parameters := list(module.parameters()):
            yield ModuleLayer(name, module, parameters)
        return
    if own := [p for p in module._parameters.values() if p is not None]:
        yield ModuleLayer(name, module, own)
    for child_name, child in module.named_children():
        full_name = f"{name}.{child_name}" if name else child_name
        yield from _visit(full_name, child, isinstance(module, LISTS), total)


def _is_divided(module: nn.Module, total: int) -> bool:
    large = LARGE * sum(p.numel() for p in module.parameters()) > total
    return large and any(isinstance(m, LISTS) and any(True for _ in m.parameters()) for m in module.modules())


def units_by_parameter(layers: Sequence[ModuleLayer], gathering: LayerGathering) -> dict[nn.Parameter, Unit]:
    """The unit of each gathered parameter: the parameter is a view of the unit's flat buffer."""
    storage = lambda tensor: tensor.untyped_storage()._cdata
    units = {storage(unit.flat): unit for needs in gathering.needs for unit in needs}
    return {p: units[storage(p)] for layer in layers for p in layer.parameters if storage(p) in units}


def tensors_in(value: Any, _seen: set[int] | None = None) -> Iterator[torch.Tensor]:
    """The tensors of a layer's output, however it wraps them."""
    seen = set() if _seen is None else _seen
    if isinstance(value, torch.Tensor):
        yield value
    elif id(value) not in seen and not isinstance(value, nn.Module | type | str | bytes):
        seen.add(id(value))
        if isinstance(value, Mapping):
            value = list(value.values())
        items = value if isinstance(value, tuple | list | set) else ()
        for item in (*items, *getattr(value, "__dict__", {}).values()):
            yield from tensors_in(item, seen)
