"""`ModuleGathering`: ZeRO stage 3 for any module, by hooks on its layers.

A `LayerGathering` must be called when a layer is entered and left. In forward, hooks around the layer's call
do this. In backward, a hook on the layer's output runs when its backward begins; the layers behind it have
then finished theirs:

Note: the order of backward. Autograd executes the nodes of a graph from the newest to the oldest. When it
reaches the output of a call, all nodes recorded after that output are done: the calls that *began* after it
can be left. (A call that encloses others, such as that of a module with parameters of its own, began before
them and is left after them.)

The order and the uses of layers are unknown, so

* *order.* Layers are gathered ahead only if the last forward went through each of them once, in the order of
  registration;
* *uses.* A layer that is called several times is left, for its gradients, when the backward of its first call
  is over. Gradients of a layer are reduced only after those of all layers behind it, whatever order the
  backward takes;
* *foreign reads.* A parameter that another layer reads (`F.linear(x, self.embedding.weight)`) is gathered for
  that layer from then on; a parameter that is read outside of all layers stays whole to the end of the step;
* *recomputation* in backward (torch.utils.checkpoint) runs forwards again. What it reads inside of a layer
  whose backward has begun belongs to that layer. A recomputed layer whose backward has not begun is whole
  until the next one is recomputed, or until its own backward is over.

Note: nested backwards. A re-entrant checkpoint runs a backward inside the backward, on a graph that it has
just recorded; torch numbers these *graph tasks*. The order above holds among calls that were recorded in the
same task, and each layer is left at the end of the task that reached it, if not before. The first forward of
such a checkpoint runs without gradients, and its outputs have no hooks. It counts as a call whose backward is
to come, which begins when that of its recomputation does (`_Call.repeats`).

Note: hidden parameters. Reading a storage of zero bytes ends the process. While no graph is alive, parameters
therefore show one NaN, expanded to their shape. A parameter has three states:

    hidden      shows NaN; its unit is free                     `hide`
    shown       a view of its unit's buffer, whose contents     `_show`, at the first forward or backward
                are defined while the unit is gathered
    claimed     shown, and its unit stays gathered: for a       `Unit.claims`
                layer, an open context (`whole`) or OUTSIDE
"""

import logging
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from ...mpu.managed_parameter import spec_of
from ...zero.gathering import GatherUnit, LayerGathering, Unit
from .leaf_modules import with_gradient, z3_leaf_module
from .module_specs import ModuleLayer, tensors_in, units_of_layers
from .watched import Hook, WatchedParameters

MOST_NOTED = 1 << 16  # uses of layers
OUTSIDE = "outside"  # the claim of a read outside of all layers, to the end of the step
logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Call:
    """One forward of a layer: its begin and end on a clock that ticks at each begin and end of a call."""

    layer: int
    began: int
    # The graph task that recomputes it, -1 for a forward outside of backward.
    recorded_in: int
    ended: int = 0
    reached_in: int = 0  # the number of the last backward that reached its output
    task: int = 0  # the graph task in which it did
    # The call without gradients of which this is the recomputation.
    repeats: "_Call | None" = None

    def is_before(self, other: "_Call") -> bool:
        """Return whether the other call is over in backward when this one's output is reached."""
        if self.recorded_in == other.recorded_in:
            return other.began > self.ended
        return self.repeats is not None and self.repeats.is_before(other)


class ModuleGathering:
    """Installs hooks on `module`; they stay.

    layers     of the module, numbered as in `gathering`
    prefetch   elements gathered ahead once the order is known; None: one layer
    """

    def __init__(
        self,
        module: nn.Module,
        layers: Sequence[ModuleLayer],
        gathering: LayerGathering,
        prefetch: int | None,
    ):
        # The layers, and the collectives that close them in order.
        self.layers = layers
        self.gathering = gathering
        self._prefetch = prefetch
        self._closing = _InOrder(gathering)
        gathering.close = self._closing.left
        # Calls of layers, which nest, repeat and are recomputed.
        self._active: list[_Call] = []  # running forwards, the innermost last
        # Calls whose backward has not begun, per layer.
        self._waiting: Counter[int] = Counter()
        self._unannounced: set[int] = set()  # layers with calls that were not counted
        self._without_grad: dict[
            int, list[_Call]
        ] = {}  # calls that may be recomputed, per layer
        self._open: list[_Call] = []  # running backwards
        # Running graph tasks, each with a callback at its end.
        self._tasks: set[int] = set()
        # A layer that is whole after its recomputation.
        self._recomputed: int | None = None
        self._route: list[int] = []  # layers in the order of the running forward
        # Positions in the running pass.
        self._clock = self._depth = self._backwards = 0
        self._in_backward = self._root_has_grad = False
        # Layers with gathered parameters, and the views that replace these.
        self._hooked = [i for i, units in enumerate(gathering.needs) if units]
        self._unit_of = units_of_layers(layers, gathering)
        self._reported: set[nn.Parameter] = set()
        self._values = {p: p.data for p in self._unit_of}
        self._hidden: set[nn.Parameter] = set()
        self._install(module)

    @property
    def is_whole(self) -> bool:
        """Whether all parameters can be read now."""
        return not self._hidden and not any(
            unit.is_free for unit in self._unit_of.values()
        )

    def has(self, parameter: nn.Parameter) -> bool:
        """Return whether this parameter can be read now."""
        unit = self._unit_of.get(parameter)
        return parameter not in self._hidden and not (unit is not None and unit.is_free)

    @contextmanager
    def backward(self) -> Iterator[None]:
        """A context around a backward."""
        self._in_backward = True
        self._backwards += 1
        self._unannounced.clear()
        self._closing.begin()
        self._show()
        try:
            yield
            self._leave_recomputed()
            self._leave_all(list(self._open))
            # Units that were gathered ahead for layers that the backward did not reach.
            self.gathering.drop_claims()
        finally:
            self._in_backward = False
            self._open.clear()
            self._tasks.clear()
            self._waiting.clear()
            self._without_grad.clear()
            self._recomputed = None
            self.hide()

    @contextmanager
    def whole(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """A context in which these parameters (and others of their layers) are whole. Collective."""
        token = ("context", object())
        units = list(
            dict.fromkeys(self._unit_of[p] for p in parameters if p in self._unit_of)
        )
        for unit in units:
            unit.claims.add(token)
            unit.start()
        for unit in units:
            unit.wait()
        hidden = [
            p
            for p, unit in self._unit_of.items()
            if unit in units and p in self._hidden
        ]
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
        """Let these parameters (None: all) show NaN until the next forward or backward."""
        for p in list(self._values if parameters is None else parameters):
            p.data = torch.full((), torch.nan, dtype=p.dtype, device=p.device).expand(
                p.shape
            )
            self._hidden.add(p)

    def _show(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        for p in list(self._hidden if parameters is None else parameters):
            p.data = self._values[p]
            self._hidden.discard(p)

    def fetch(self, parameter: nn.Parameter) -> None:
        """Make a parameter that is read in a forward whole, also for backward. Collective if it was not."""
        unit = self._unit_of.get(parameter)
        if unit is None or not (self._active or self._depth or self._in_backward):
            return
        self._show()
        # In backward only recomputations read parameters by name: those of layers that are open.
        running = [*self._open, *self._active]
        reader = next(
            (
                call.layer
                for call in running
                if unit in self.gathering.needs[call.layer]
            ),
            None,
        )
        if reader is not None:
            if unit.is_free:
                self._enter(reader, backward=False)
            unit.wait()
        elif self._active:
            self._lend(unit, self._active[-1].layer)
        else:
            self._claim_outside(unit, parameter)

    def _lend(self, unit: Unit, layer: int) -> None:
        """Gather a unit for a layer to which it does not belong, from now on."""
        # Lists, as `find_layers` and `ZeroOptimizer` make them.
        needs = cast(list[GatherUnit], self.gathering.needs[layer])
        in_backward = cast(list[GatherUnit], self.gathering.in_backward[layer])
        needs.append(unit)
        if in_backward is not needs:
            in_backward.append(unit)
        self._closing.keep_open(unit.layer)
        self._enter(layer, backward=False)

    def _claim_outside(self, unit: Unit, parameter: nn.Parameter) -> None:
        if OUTSIDE in unit.claims:
            return
        if parameter not in self._reported:
            # Adapters may have hundreds of such parameters.
            level = logging.INFO if self._reported else logging.WARNING
            self._reported.add(parameter)
            logger.log(
                level,
                "%s is read outside of the forward of its module: it stays gathered to the end "
                "of each step, which takes memory. Others are logged at level INFO",
                spec_of(parameter).name,
            )
        self._closing.keep_open(unit.layer)
        unit.claims.add(OUTSIDE)
        unit.start()
        unit.wait()

    # ------------------------------------------------------------------ hooks
    def _install(self, module: nn.Module) -> None:
        module.register_forward_pre_hook(Hook(self._root_begins))
        for i in self._hooked:
            layer = self.layers[i].module
            layer.register_forward_pre_hook(Hook(partial(self._begins, i)))
            layer.register_forward_hook(Hook(partial(self._ends, i)), always_call=True)
        # The last one: the root may be a layer.
        module.register_forward_hook(Hook(self._root_ends), always_call=True)
        for owner in module.modules():
            if any(
                p in self._unit_of for p in owner._parameters.values() if p is not None
            ):
                owner._parameters = WatchedParameters(owner._parameters, self.fetch)

    def _root_begins(self, *_) -> None:
        if not self._depth:
            self._route.clear()
            self._hide_again = bool(self._hidden)
            self._root_has_grad = torch.is_grad_enabled()
        self._depth += 1

    def _root_ends(self, *_) -> None:
        self._depth -= 1
        if not self._depth and not self._in_backward:
            self._active.clear()  # of a forward that failed
            self.gathering.prefetch = (
                self._prefetch if self._route == self._hooked else 0
            )
            if self._hide_again and not torch.is_grad_enabled():
                self.hide()

    def _begins(self, layer: int, *_) -> None:
        self._show()
        self._clock += 1
        self._active.append(
            _Call(layer, self._clock, torch._C._current_graph_task_id())
        )
        if not self._in_backward:
            self._route.append(layer)
        self._enter(layer, backward=False)
        self._leave_recomputed()
        if self._in_backward or torch.is_grad_enabled():
            self._note(self.layers[layer].name)

    def _ends(self, layer: int, module: nn.Module, args: Any, output: Any) -> Any:
        self._clock += 1
        call = self._active.pop()
        call.ended = self._clock
        if self._is_open(layer):
            return output
        if z3_leaf_module(module) and not any(
            t.requires_grad for t in tensors_in(output)
        ):
            output = with_gradient(output, self.layers[layer].parameters)
        if self._await_backward(call, output) and self._in_backward:
            self._recomputed = layer  # its backward comes next
        else:
            self.gathering.leave(layer, False)
        return output

    def _await_backward(self, call: _Call, output: Any) -> bool:
        """Return whether the backward of this call will announce itself, by hooks on its output."""
        layer = call.layer
        tensors = []
        is_to_come = False
        if self._in_backward and self._without_grad.get(layer):
            call.repeats = self._without_grad[layer].pop()
        if torch.is_grad_enabled():
            tensors = [t for t in tensors_in(output) if t.requires_grad]
            for tensor in tensors:
                tensor.register_hook(partial(self._backward_reaches, call))
        elif self._in_backward or self._depth and self._root_has_grad:
            # The call may be that of a re-entrant checkpoint.
            self._without_grad.setdefault(layer, []).append(call)
            is_to_come = True
        if not self._in_backward:
            self._waiting[layer] += is_to_come or bool(tensors)
        return bool(tensors)

    def _backward_reaches(self, call: _Call, _) -> None:
        # The backward may be that of another engine, whose loss was computed with this module, too.
        if not self._in_backward:
            backward = ExitStack()
            backward.enter_context(self.backward())
            torch.autograd.Variable._execution_engine.queue_callback(backward.close)
        if call.reached_in == self._backwards:  # through another of its outputs
            return
        call.reached_in = self._backwards
        self._enter_task(call)
        self._leave_all([other for other in self._open if call.is_before(other)])
        # Its graph was retained, or has had a backward.
        if not self._waiting[call.layer]:
            self._unannounced.add(call.layer)
        self._waiting[call.layer] -= self._waiting[call.layer] > 0
        self._open.append(call)
        self._enter(call.layer, backward=True)
        self._leave_recomputed()
        self._note(f"{self.layers[call.layer].name} in backward")

    def _enter_task(self, call: _Call) -> None:
        """Note in which graph task the backward of a call runs, and leave the call at its end."""
        call.task = torch._C._current_graph_task_id()
        if call.task not in self._tasks:
            self._tasks.add(call.task)
            at_end = lambda: self._leave_all(
                [c for c in self._open if c.task == call.task]
            )
            torch.autograd.Variable._execution_engine.queue_callback(at_end)

    def _note(self, layer: str) -> None:
        """Note the use of a layer, for the comparison of the ranks in the next update."""
        path = self.gathering.path
        path.append(layer)
        if len(path) == MOST_NOTED:  # of an engine that is never updated
            path[:] = [
                f"{MOST_NOTED} layers with checksum {zlib.crc32(repr(path).encode()):08x}"
            ]

    # ------------------------------------------------------------------ entering and leaving
    def _enter(self, layer: int, backward: bool) -> None:
        """Gather the layer; and layers ahead, unless this is a forward that is recomputed."""
        prefetch = self.gathering.prefetch
        if self._in_backward and not backward:
            self.gathering.prefetch = 0
        self.gathering.enter(layer, backward)
        self.gathering.prefetch = prefetch

    def _leave_all(self, calls: Iterable[_Call]) -> None:
        """Leave the backwards of open calls, the last call first."""
        for call in sorted(calls, key=lambda call: -call.began):
            self._open.remove(call)
            self._leave_backward(call)

    def _leave_recomputed(self) -> None:
        """Leave the layer that was recomputed last, unless its backward has begun."""
        layer = self._recomputed
        self._recomputed = None
        if layer is not None and not any(
            call.layer == layer for call in (*self._open, *self._active)
        ):
            self.gathering.leave(layer, False)

    def _leave_backward(self, call: _Call) -> None:
        layer = call.layer
        is_over = not (
            self._waiting[layer] or self._is_open(layer) or layer in self._unannounced
        )
        self.gathering.leave(layer, backward=is_over)

    def _is_open(self, layer: int) -> bool:
        return any(call.layer == layer for call in self._open)


class _InOrder:
    """Closes a layer's gradients once all layers behind it were left."""

    def __init__(self, gathering: LayerGathering):
        self._close = gathering.close
        self._needed = [bool(units) for units in gathering.needs]
        self._kept: set[int] = set()
        self.begin()

    def begin(self) -> None:
        """Begin a backward: no layer with parameters has been left."""
        self._left = {i for i, needed in enumerate(self._needed) if not needed}
        self._next = len(self._needed) - 1

    def left(self, layer: int) -> None:
        """Called when a layer is left in backward."""
        self._left.add(layer)
        while (
            self._next >= 0
            and self._next in self._left
            and self._next not in self._kept
        ):
            self._close(self._next)
            self._next -= 1

    def keep_open(self, layer: int) -> None:
        """Do not close this layer before the end: other layers contribute to its gradients, too."""
        self._kept.add(layer)
