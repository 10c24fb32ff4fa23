"""`Stage`: consecutive layers on one rank, with the activations of the micro-batches that are between F and B.

A stage keeps, for each live micro-batch, its input and the `Root` of its output: the place in the autograd graph where the
backward starts. The output itself is not kept; it is freed as soon as it has been sent, unless an operation
saved it for its own backward. A backward comes whole, or in two halves (backward.py).
"""

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from ..data.batch import Batch
from .backward import SplitBackward
from .root import Root

LayerHook = Callable[[int, bool], None]


@dataclass(slots=True)
class _Live:
    """A micro-batch between its forward and its backward."""

    input: Tensor | None              # None on the first stage, which reads tokens
    root: Root | None                 # None when nothing in the output needs a gradient (frozen layers)


class Stage:
    """The layers of global stage `index`.

    modules  called in order as module(x, batch); the first layer of the model ignores x
    loss     on the last stage, loss(x, batch) → an object with `objective`, a scalar tensor that is differentiated and is
             not a view; it is detached in place, so that keeping the loss of a step keeps no graph alive.
             None: the output of the last layer is the result (forward only)
    enter, leave  called with (number of the module, whether in backward) around the work of each module: for parameters
             that are not there all the time. Not around a weight half, which reads no parameters
    complete  called with the number of a module when a weight half has delivered its gradients
    """

    def __init__(self, index: int, modules: Sequence[nn.Module], *, is_first: bool, is_last: bool,
                 loss: Callable[[Tensor, Batch], Any] | None = None, enter: LayerHook | None = None,
                 leave: LayerHook | None = None, complete: Callable[[int], None] | None = None):
        self.index, self.modules, self.is_first, self.is_last, self.loss = index, modules, is_first, is_last, loss
        self.enter, self.leave, self.complete = enter, leave, complete or _no_hook
        self.live: dict[int, _Live] = {}

    def forward(self, microbatch: int, batch: Batch, x: Tensor | None, scale: float) -> Any:
        """Output for the next stage, detached; the loss object on the last stage.

        Outside `torch.no_grad()` the micro-batch stays live until its backward, which starts from `scale` on the last stage.
        """
        training = torch.is_grad_enabled()
        if x is not None and training:
            x = x.detach().requires_grad_()
        output = self._run(x, batch)
        if self.loss is None or not self.is_last:
            if training:
                self.live[microbatch] = _Live(x, _root_of(output))
            return output.detach()
        loss = self.loss(output, batch)
        if training:
            root = _root_of(loss.objective)
            if root is not None:
                root.give(torch.full_like(loss.objective, scale))
            self.live[microbatch] = _Live(x, root)
            loss.objective.detach_()
        return loss

    def backward(self, microbatch: int, grad: Tensor | None) -> Tensor | None:
        """Gradient of the input (None on the first stage) from that of the output (None where the stage ends in a loss).

        Gradients of parameters go where autograd and the layers put them.
        """
        live = self._to_start(microbatch, grad)
        if live.root is not None:
            with self._layers_in_backward():
                torch.autograd.backward(live.root.edge)
        return None if live.input is None else live.input.grad

    def backward_input(self, microbatch: int, grad: Tensor | None) -> Tensor | None:
        """The first half of `backward`: its result, and no parameter's gradient. `backward_weights` must follow."""
        live = self._to_start(microbatch, grad)
        if live.root is None:
            return self._split.input_half(microbatch, None, live.input)
        with self._layers_in_backward():
            return self._split.input_half(microbatch, live.root.edge, live.input)

    def backward_weights(self, microbatch: int) -> None:
        """The other half: the gradients of parameters go where `backward` would have put them."""
        self._split.weight_half(microbatch, self.complete)

    def _to_start(self, microbatch: int, grad: Tensor | None) -> _Live:
        live = self.live.pop(microbatch)
        if live.root is not None and grad is not None:
            live.root.give(grad)
        return live

    @cached_property
    def _split(self) -> SplitBackward:
        return SplitBackward(self.modules)

    @contextmanager
    def _layers_in_backward(self):
        if self.enter is not None:
            self.enter(len(self.modules) - 1, True)
        yield
        if self.leave is not None:
            self.leave(0, True)

    def _run(self, x: Tensor | None, batch: Batch) -> Tensor:
        if self.enter is None:
            for module in self.modules:
                x = module(x, batch)
            return x
        for i, module in enumerate(self.modules):
            self.enter(i, False)
            x = module(x, batch)
            self.leave(i, False)
            if i + 1 < len(self.modules) and x.requires_grad:
                x.register_hook(partial(self._cross, i))
        return x

    def _cross(self, i: int, grad: Tensor) -> None:
        """Backward has gone from module i + 1 to module i."""
        self.leave(i + 1, True)
        self.enter(i, True)

    def check_empty(self) -> None:
        """Between steps no micro-batch may be alive."""
        assert not self.live, f"stage {self.index}: micro-batches {sorted(self.live)} had a forward but no backward"
        assert not self._split.waiting, (f"stage {self.index}: micro-batches {sorted(self._split.waiting)} had the input half "
                                         "of a backward but not its weight half")

    def clear(self) -> None:
        """Forget all live micro-batches, after a step that failed."""
        self.live.clear()
        self._split.waiting.clear()


def _no_hook(layer: int) -> None:
    pass


def _root_of(output: Tensor) -> Root | None:
    return Root(output) if output.requires_grad else None
