"""`ModuleGathering`: stage 3 for a module that knows nothing of it, by hooks on its layers.

A `LayerGathering` is called when a layer is entered and left. In forward, hooks around the layer's call do so. In backward, a
hook on the layer's output runs when its backward begins; that of the layers behind it is over by then:

Note: the order of backward. Autograd carries out the nodes of a graph from the newest to the oldest. So when it comes to the
output of one call, all that was recorded after that output is done: calls that *began* after it are left. (A call that
encloses others, such as that of a module with parameters of its own, began before them and is left after them.)

Nothing is known of the module, so

* *order.* Layers are gathered ahead only when the last forward went through all of them once, in the order of registration;
* *uses.* A layer that is called more than once is left, for its gradients, when the first of the calls is through; and
  gradients of a layer are reduced only after those of all behind it, whatever order the backward takes;
* *strangers.* A parameter read by another layer's code (`F.linear(x, self.embedding.weight)`) is gathered for that layer from
  then on; read outside of all layers, it stays whole to the end of the step;
* *recomputation* in backward (torch.utils.checkpoint) runs the forward hooks again. A layer whose backward is under way stays.

Note: hidden. To read a storage of no bytes ends the process. So while no graph is alive, parameters show one NaN instead,
expanded to their shape.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from ..zero.gathering import LayerGathering
from ..zero.units import Unit
from .module_layers import ModuleLayer

OUTSIDE = "outside"         # claims a unit to the end of the step
logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Call:
    """One forward of a layer: its span on a clock that ticks at the beginning and the end of each call."""

    layer: int
    began: int
    ended: int = 0
    reached_in: int = 0         # the number of the backward that came here


class ModuleGathering:
    """Installs its hooks on `module` for good.

    layers     of the module, numbered as in `gathering`
    prefetch   elements gathered ahead once the order is known; None: one layer
    """

    def __init__(self, module: nn.Module, layers: Sequence[ModuleLayer], gathering: LayerGathering, prefetch: int | None):
        self.layers, self.gathering = layers, gathering
        self._prefetch = prefetch
        self._closing = _InOrder(gathering)
        gathering.close = self._closing.left
        self._active: list[_Call] = []              # forwards under way, the innermost last
        self._waiting: Counter[int] = Counter()     # calls with a backward to come, per layer
        self._unannounced: set[int] = set()         # layers of which it is not known how many calls are to come
        self._open: list[_Call] = []                # backwards under way
        self._route: list[int] = []                 # layers in the order of the forward under way
        self._clock = self._depth = self._backwards = 0
        self._in_backward = False
        self._hooked = [i for i, units in enumerate(gathering.needs) if units]
        self._unit_of = _units_by_parameter(layers, gathering)
        self._told: set[nn.Parameter] = set()
        self._values = {p: p.data for p in self._unit_of}
        self._hidden: set[nn.Parameter] = set()
        self._install(module)

    @property
    def is_whole(self) -> bool:
        """Whether all parameters can be read now."""
        return not self._hidden and not any(unit.is_free for unit in self._unit_of.values())

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around a backward."""
        self._begin_backward()
        try:
            yield
            self._leave_all()
        finally:
            self._end_backward()

    def _begin_backward(self) -> None:
        self._in_backward = True
        self._backwards += 1
        self._unannounced.clear()
        self._closing.begin()
        self._show()

    def _leave_all(self) -> None:
        while self._open:
            self._leave_backward(self._open.pop(max(range(len(self._open)), key=lambda i: self._open[i].began)))
        self._let_go()

    def _end_backward(self) -> None:
        self._in_backward = False
        self._open.clear()
        self._waiting.clear()
        self.hide()

    def _begin_backward_of_another(self) -> None:
        """Another engine's loss was computed with this module: its backward comes through here, and ends by itself."""
        def end() -> None:
            self._leave_all()
            self._end_backward()

        self._begin_backward()
        torch.autograd.Variable._execution_engine.queue_callback(end)

    @contextmanager
    def whole(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Inside, these parameters (and others of their layers) are whole. Collective over the data group."""
        token = object()
        units = list(dict.fromkeys(self._unit_of[p] for p in parameters if p in self._unit_of))
        for unit in units:
            unit.claims.add(token)
            unit.start()
        for unit in units:
            unit.wait()
        hidden = [p for p, unit in self._unit_of.items() if unit in units and p in self._hidden]
        self._show(hidden)
        try:
            yield
        finally:
            self.hide(hidden)
            for unit in units:
                unit.claims.discard(token)
                if not unit.claims:
                    unit.free()

    def hide(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """These parameters (None: all) read as NaN until the next forward or backward."""
        for p in list(self._values if parameters is None else parameters):
            p.data = torch.full((), torch.nan, dtype=p.dtype, device=p.device).expand(p.shape)
            self._hidden.add(p)

    def _show(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        for p in list(self._hidden if parameters is None else parameters):
            p.data = self._values[p]
            self._hidden.discard(p)

    def fetch(self, parameter: nn.Parameter) -> None:
        """A parameter is read: inside a forward, see that it is whole, then and in the backward. Collective if it was not."""
        unit = self._unit_of.get(parameter)
        if unit is None or not (self._active or self._depth or self._in_backward):
            return
        self._show()
        if not self._active:
            self._claim_outside(unit, parameter)
        elif not any(unit in self.gathering.needs[call.layer] for call in self._active):
            layer = self._active[-1].layer
            for needs in _distinct(self.gathering.needs[layer], self.gathering.in_backward[layer]):
                needs.append(unit)
            self._closing.keep_open(unit.layer)
            self._enter(layer, backward=False)

    def _claim_outside(self, unit: Unit, parameter: nn.Parameter) -> None:
        if OUTSIDE in unit.claims:
            return
        if parameter not in self._told:
            self._told.add(parameter)
            logger.warning("%s is read outside of the forward of its module: it stays whole from there to the end of each "
                           "step", parameter.spec.name)
        self._closing.keep_open(unit.layer)
        unit.claims.add(OUTSIDE)
        unit.start()
        unit.wait()

    # ------------------------------------------------------------------ hooks
    def _install(self, module: nn.Module) -> None:
        module.register_forward_pre_hook(self._root_begins)
        for i in self._hooked:
            layer = self.layers[i].module
            layer.register_forward_pre_hook(partial(self._begins, i))
            layer.register_forward_hook(partial(self._ends, i), always_call=True)
        module.register_forward_hook(self._root_ends, always_call=True)      # after those of a layer that is the root
        for owner in module.modules():
            if any(p in self._unit_of for p in owner._parameters.values() if p is not None):
                owner._parameters = _Watched(owner._parameters, self)

    def _root_begins(self, *_) -> None:
        if not self._depth:
            self._route.clear()
            self._hide_again = bool(self._hidden)
        self._depth += 1

    def _root_ends(self, *_) -> None:
        self._depth -= 1
        if not self._depth and not self._in_backward:
            self._active.clear()                    # of a forward that failed
            self.gathering.prefetch = self._prefetch if self._route == self._hooked else 0
            if self._hide_again and not torch.is_grad_enabled():
                self.hide()

    def _begins(self, layer: int, *_) -> None:
        self._show()
        self._clock += 1
        self._active.append(_Call(layer, self._clock))
        if not self._in_backward:
            self._route.append(layer)
        if not self._is_open(layer):
            self._enter(layer, backward=False)

    def _ends(self, layer: int, module: nn.Module, args: Any, output: Any) -> None:
        self._clock += 1
        call = self._active.pop()
        call.ended = self._clock
        if self._is_open(layer):
            return
        if torch.is_grad_enabled() and output is not None:
            tensors = [t for t in tensors_in(output) if t.requires_grad]
            for tensor in tensors:
                tensor.register_hook(partial(self._backward_reaches, call))
            if not self._in_backward:
                self._waiting[layer] += bool(tensors)
        self.gathering.leave(layer, False)

    def _backward_reaches(self, call: _Call, _) -> None:
        if not self._in_backward:
            self._begin_backward_of_another()
        if call.reached_in == self._backwards:         # by another of its outputs
            return
        call.reached_in = self._backwards
        for other in [c for c in self._open if c.began > call.ended]:
            self._open.remove(other)
            self._leave_backward(other)
        if not self._waiting[call.layer]:               # of a graph that is retained, or older than the last backward
            self._unannounced.add(call.layer)
        self._waiting[call.layer] -= self._waiting[call.layer] > 0
        self._open.append(call)
        self._enter(call.layer, backward=True)

    # ------------------------------------------------------------------ entering and leaving
    def _enter(self, layer: int, backward: bool) -> None:
        """Gathers ahead in the direction of the pass; not for a forward that is recomputed within a backward."""
        prefetch = self.gathering.prefetch
        if self._in_backward and not backward:
            self.gathering.prefetch = 0
        self.gathering.enter(layer, backward)
        self.gathering.prefetch = prefetch

    def _leave_backward(self, call: _Call) -> None:
        is_over = not (self._waiting[call.layer] or self._is_open(call.layer) or call.layer in self._unannounced)
        self.gathering.leave(call.layer, backward=is_over)

    def _let_go(self) -> None:
        """Of what was gathered ahead for a backward that took another way."""
        for unit in dict.fromkeys(self._unit_of.values()):
            unit.claims.difference_update(self._hooked)
            if not unit.claims:
                unit.free()

    def _is_open(self, layer: int) -> bool:
        return any(call.layer == layer for call in self._open)


class _InOrder:
    """Passes on that a layer was left once all layers behind it were."""

    def __init__(self, gathering: LayerGathering):
        self._close = gathering.close
        self._needed = [bool(units) for units in gathering.needs]
        self._kept: set[int] = set()
        self.begin()

    def begin(self) -> None:
        """A backward begins."""
        self._left = {i for i, needed in enumerate(self._needed) if not needed}
        self._next = len(self._needed) - 1

    def left(self, layer: int) -> None:
        self._left.add(layer)
        while self._next >= 0 and self._next in self._left and self._next not in self._kept:
            self._close(self._next)
            self._next -= 1

    def keep_open(self, layer: int) -> None:
        """Gradients of this layer come from others too: reduce them when all is over."""
        self._kept.add(layer)


class _Watched(dict):
    """A module's `_parameters`: the gathering is called when one is read by name."""

    def __init__(self, parameters: Mapping[str, nn.Parameter | None], gathering: ModuleGathering):
        super().__init__(parameters)
        self._gathering = gathering

    def __getitem__(self, name: str) -> nn.Parameter | None:
        parameter = super().__getitem__(name)
        if parameter is not None:
            self._gathering.fetch(parameter)
        return parameter


def tensors_in(value: Any, _seen: set[int] | None = None) -> Iterator[torch.Tensor]:
    """The tensors of a layer's output, however it wraps them."""
    seen = set() if _seen is None else _seen
    if isinstance(value, torch.Tensor):
        yield value
    elif id(value) not in seen and not isinstance(value, nn.Module | type | str | bytes):
        seen.add(id(value))
        items = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple | list | set) else ()
        for item in (*items, *getattr(value, "__dict__", {}).values()):
            yield from tensors_in(item, seen)


def _units_by_parameter(layers: Sequence[ModuleLayer], gathering: LayerGathering) -> dict[nn.Parameter, Unit]:
    """A parameter is a view of its unit's flat buffer: they share a storage."""
    storage = lambda tensor: tensor.untyped_storage()._cdata
    units = {storage(unit.flat): unit for needs in gathering.needs for unit in needs}
    return {p: units[storage(p)] for layer in layers for p in layer.parameters if storage(p) in units}


def _distinct(*lists: list) -> list[list]:
    return list({id(one): one for one in lists}.values())
