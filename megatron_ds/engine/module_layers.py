"""The layers of any module: what stage 3 gathers at a time.

    elements of a ModuleList, ModuleDict or Sequential     a layer each, with all that is in them
    any other module that owns parameters itself           a layer of those

An element that holds more than a quarter of the model, and has lists of its own, is taken apart like the rest. The order is
that in which modules were registered; it should be that of the forward (see module_gathering.py for what happens otherwise).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
LARGE = 4       # one part in so many


@dataclass(frozen=True, eq=False)
class ModuleLayer:
    """parameters: those that are gathered around the forward of `module`. read_in_backward: its backward needs them."""

    name: str
    module: nn.Module
    parameters: list[nn.Parameter]

    @property
    def read_in_backward(self) -> bool:
        return not isinstance(self.module, nn.Embedding)


def find_layers(module: nn.Module) -> list[ModuleLayer]:
    """Every parameter of `module` is in one layer at least; a module that stands in two places is one layer."""
    total = sum(p.numel() for p in module.parameters())
    found: dict[nn.Module, ModuleLayer] = {}
    for layer in _visit("", module, False, total):
        found.setdefault(layer.module, layer)
    return list(found.values())


def _visit(name: str, module: nn.Module, is_element: bool, total: int) -> Iterator[ModuleLayer]:
    if is_element and not isinstance(module, nn.ModuleList | nn.ModuleDict) and not _is_taken_apart(module, total):
        if parameters := list(module.parameters()):
            yield ModuleLayer(name, module, parameters)
        return
    if own := [p for p in module._parameters.values() if p is not None]:
        yield ModuleLayer(name, module, own)
    for child_name, child in module.named_children():
        yield from _visit(f"{name}.{child_name}" if name else child_name, child, isinstance(module, LISTS), total)


def _is_taken_apart(module: nn.Module, total: int) -> bool:
    large = LARGE * sum(p.numel() for p in module.parameters()) > total
    return large and any(isinstance(m, LISTS) and any(True for _ in m.parameters()) for m in module.modules())
