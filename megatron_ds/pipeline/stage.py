"""`Stage`: consecutive layers on one rank, and the activations of micro-batches between their forward and
backward.

A stage keeps, for each live micro-batch, its input and the `Root` of its output, the place in the autograd
graph where the backward starts. The output itself is freed as soon as it has been sent, unless an operation
saved it for its own backward. A backward comes whole, or in two halves (backward.py).

Layers may add loss terms and metrics to the ledger of the batch (batch/ledger.py). The terms of a layer are
attached to its output, so each is differentiated with the layer itself, on any stage, in a whole or a split
backward.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from ..batch.batch import Batch
from ..batch.ledger import Entry, Ledger
from .backward import Root, SplitBackward, attach


@dataclass(frozen=True)
class LayerHooks:
    """Called around the work of each layer, for parameters that are gathered and released layer by layer.

    enter, leave  called with (number of the layer in its stage, whether in backward). Not around a weight
                  half, which reads no parameters
    complete      called with the number of a layer when a weight half has delivered its gradients
    before        called with the number of a layer before each forward of it
    """

    enter: Callable[[int, bool], None] | None = None
    leave: Callable[[int, bool], None] | None = None
    complete: Callable[[int], None] = lambda layer: None
    before: Callable[[int], None] | None = None


@dataclass(slots=True)
class _Live:
    """A micro-batch between its forward and its backward."""

    input: Tensor | None  # None on the first stage, which reads tokens
    # None when nothing in the output needs a gradient (frozen layers).
    root: Root | None


class Stage:
    """The layers of global stage `index`.

    modules  called in order as module(x, batch); the first layer of the model ignores x
    loss     on the last stage, loss(x, batch) → an object with `objective`, a scalar tensor that is
             differentiated and is not a view; it is detached in place, so that keeping the loss of a step
             keeps no graph alive. None: the output of the last layer is the result (forward only)
    per_token  the loss sums over tokens instead of averaging, and gradients are divided by the tokens of the
               step
    entries  what layers added to the ledgers since the executor began its step, detached
    """

    def __init__(
        self,
        index: int,
        modules: Sequence[nn.Module],
        *,
        is_first: bool,
        is_last: bool,
        loss: Callable[[Tensor, Batch], Any] | None = None,
        hooks: LayerHooks = LayerHooks(),
        per_token: bool = False,
    ):
        self.index = index
        self.modules = modules
        self.is_first = is_first
        self.is_last = is_last
        self.loss = loss if is_last else None
        self.hooks = hooks
        self.per_token = per_token
        self.live: dict[int, _Live] = {}
        self.entries: list[Entry] = []
        self._entered = 0  # the layer that a backward has reached

    def forward(
        self, microbatch: int, batch: Batch, x: Tensor | None, scale: float
    ) -> Any:
        """Output for the next stage, detached; the loss object on the last stage.

        Outside `torch.no_grad()` the micro-batch stays live until its backward. The backward of the loss and
        of the layers' loss terms starts from `scale`.
        """
        # The layers, with a ledger for their numbers.
        training = torch.is_grad_enabled()
        if x is not None and training:
            x = x.detach().requires_grad_()
        ledger = Ledger(batch.counted_by_sequence if self.per_token else None)
        batch = batch.with_ledger(ledger)
        attached = partial(self._with_terms, ledger, batch, scale)
        output = self._run(x, batch, attached)
        # A stage in the middle hands its output on.
        if self.loss is None:
            ledger.close()
            if training:
                self.live[microbatch] = _Live(x, _root_of(output))
            return output.detach()
        # The last stage computes the loss.
        loss = self.loss(output, batch)
        objective = attached(loss.objective)
        ledger.close()
        if training:
            root = _root_of(objective)
            if root is not None:
                root.give(torch.full_like(objective, scale))
            self.live[microbatch] = _Live(x, root)
            loss.objective.detach_()
        return loss

    def backward(self, microbatch: int, grad: Tensor | None) -> Tensor | None:
        """Gradient of the input (None on the first stage) from that of the output (None before a loss).

        Gradients of parameters are accumulated by autograd and the layers.
        """
        live = self._to_start(microbatch, grad)
        if live.root is not None:
            with self._layers_in_backward():
                torch.autograd.backward(live.root.edge)
        return None if live.input is None else live.input.grad

    def backward_input(self, microbatch: int, grad: Tensor | None) -> Tensor | None:
        """Run the first half of `backward`: no parameter's gradient. `backward_weights` must follow."""
        live = self._to_start(microbatch, grad)
        if live.root is None:
            return self._split.input_half(microbatch, None, live.input)
        with self._layers_in_backward():
            return self._split.input_half(microbatch, live.root.edge, live.input)

    def backward_weights(self, microbatch: int) -> None:
        """The other half: parameters receive the gradients that `backward` would have given them."""
        self._split.weight_half(microbatch, self.hooks.complete)

    def begin_step(self) -> None:
        """Forget the ledger entries of the last step."""
        self.entries = []

    @contextmanager
    def computing(self, loss: Callable[[Tensor, Batch], Any]) -> Iterator[None]:
        """Inside, the last stage computes `loss` in place of its own; forward only. Other stages: no change."""
        own = self.loss
        if self.is_last:
            self.loss = loss
        try:
            yield
        finally:
            self.loss = own

    def check_empty(self) -> None:
        """Between steps no micro-batch may be alive."""
        assert not self.live, (
            f"stage {self.index}: micro-batches {sorted(self.live)} had a forward but no "
            "backward"
        )
        assert not self._split.waiting, (
            f"stage {self.index}: micro-batches {sorted(self._split.waiting)} "
            "had the input half of a backward but not its weight half"
        )

    def clear(self) -> None:
        """Drop all live micro-batches and entries, after a step that failed."""
        self.live.clear()
        self.entries = []
        self._split.waiting.clear()

    def _run(
        self, x: Tensor | None, batch: Batch, attached: Callable[[Tensor], Tensor]
    ) -> Any:
        """Return the output of the last layer. Terms of a layer that a loss follows are left for the objective."""
        enter = self.hooks.enter
        leave = self.hooks.leave
        before = self.hooks.before
        last = len(self.modules) - 1
        for i, module in enumerate(self.modules):
            if enter is not None:
                enter(i, False)
            if before is not None:
                before(i)
            x = module(x, batch)
            if leave is not None:
                leave(i, False)
            if i < last or self.loss is None:
                x = attached(x)
            if enter is not None and i < last and x.requires_grad:
                x.register_hook(partial(self._cross, i))
        return x

    def _with_terms(
        self, ledger: Ledger, batch: Batch, scale: float, x: Tensor
    ) -> Tensor:
        """x with the loss terms that were added since the last call; all entries are kept for the report."""
        added = ledger.take()
        if not added:
            return x
        self.entries += [entry.detached() for entry in added]
        terms = [
            entry
            for entry in added
            if entry.weight is not None and entry.value.requires_grad
        ]
        if not terms or not torch.is_grad_enabled():
            return x
        tokens = batch.counted_tokens if self.per_token else None
        return attach(
            x,
            [entry.value for entry in terms],
            [entry.gradient(scale, tokens) for entry in terms],
        )

    def _cross(self, i: int, grad: Tensor) -> None:
        """Backward has gone from module i + 1 to module i."""
        if self.hooks.leave is not None:
            self.hooks.leave(i + 1, True)
        if self.hooks.enter is not None:
            self.hooks.enter(i, True)
        self._entered = i

    @contextmanager
    def _layers_in_backward(self) -> Iterator[None]:
        if self.hooks.enter is not None:
            self.hooks.enter(len(self.modules) - 1, True)
            self._entered = len(self.modules) - 1
        yield
        if self.hooks.leave is not None:
            # Layer 0, or the first one that is trained: backward does not reach frozen layers before it.
            self.hooks.leave(self._entered, True)

    def _to_start(self, microbatch: int, grad: Tensor | None) -> _Live:
        live = self.live.pop(microbatch)
        if live.root is not None and grad is not None:
            live.root.give(grad)
        return live

    @cached_property
    def _split(self) -> SplitBackward:
        return SplitBackward(self.modules)


def _root_of(output: Tensor) -> Root | None:
    return Root(output) if output.requires_grad else None
