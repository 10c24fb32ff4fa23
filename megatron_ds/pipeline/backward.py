"""`SplitBackward`: a backward in two halves (Qi et al. 2024, arXiv:2401.10241, section 2).

    input half   the gradients of the activations, down to that of the stage's input. Others wait for nothing else
    weight half  the gradients of the parameters; whenever it suits, micro-batches in their order

While the input half runs, each parameter of the stage carries a list `grad_queue`. A layer whose weight gradient is worth
deferring appends (parameter, begin); begin() starts collectives and returns what computes the gradient, or adds it to where
it belongs and returns None. What other layers compute (sums for biases and norms) autograd hands to us instead of
accumulating it. Either way gradients are *delivered* in the weight half alone: added up, and announced to hooks, micro-batch
by micro-batch and layer by layer from the last to the first, like in a whole backward and with the same bits.

Between the halves remain: of each deferred gradient its two factors, and the small gradients.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from .root import backward_from

Begin = Callable[[], Callable[[], Tensor | None]]


class SplitBackward:
    """The halves of the micro-batches of one stage; `modules` are its layers."""

    def __init__(self, modules: Sequence[nn.Module]):
        holders: dict[nn.Parameter, list[int]] = defaultdict(list)
        for layer, module in enumerate(modules):
            for p in module.parameters():
                holders[p].append(layer)
        self.num_layers, self.parameters = len(modules), list(holders)
        self._layer_of = {p: layers[0] for p, layers in holders.items() if len(layers) == 1}
        self._completed_with: list[list[nn.Parameter]] = [[] for _ in modules]      # the last layer that backward passes
        for p, layers in holders.items():
            self._completed_with[layers[0]].append(p)
        self.waiting: dict[int, tuple[list[tuple[nn.Parameter, Begin]], dict[nn.Parameter, Tensor]]] = {}

    def input_half(self, microbatch: int, edge: GradientEdge | None, x: Tensor | None) -> Tensor | None:
        """The gradient of x, a leaf, in a backward from the `Root` at `edge`.

        What is left to do waits under the micro-batch's number. Nothing is, where edge is None or nothing wants a
        gradient: frozen layers."""
        self.waiting[microbatch] = [], {}
        queue: list[tuple[nn.Parameter, Begin]] = []
        wanted = [p for p in self.parameters if p.requires_grad]
        inputs = wanted if x is None else [*wanted, x]
        if edge is None or not inputs:
            return None
        for p in wanted:
            p.grad_queue = queue
        try:
            found = torch.autograd.grad(edge, inputs, allow_unused=True)
        finally:
            for p in wanted:
                del p.grad_queue
        self.waiting[microbatch] = queue, {p: g for p, g in zip(wanted, found) if g is not None}
        return None if x is None else found[-1]

    @torch.no_grad()                                        # as autograd does for what runs in a backward
    def weight_half(self, microbatch: int, completed: Callable[[int], None]) -> None:
        """Deliver the gradients of a micro-batch. `completed` is called with each layer, last to first, when its are in."""
        queue, gradients = self.waiting.pop(microbatch)
        queue.reverse()                                     # taken from the end, so that factors are freed one by one
        layer = self.num_layers - 1
        begun = _begin(queue)
        while begun is not None:
            parameter, finish = begun
            while layer > self._layer_of.get(parameter, layer):
                self._complete(layer, gradients, completed)
                layer -= 1
            begun = _begin(queue)                           # one ahead: it gathers while this one computes
            gradient = finish()
            del finish
            if gradient is not None:
                gradients[parameter] = gradients[parameter] + gradient if parameter in gradients else gradient
        for rest in range(layer, -1, -1):
            self._complete(rest, gradients, completed)

    def _complete(self, layer: int, gradients: dict[nn.Parameter, Tensor], completed: Callable[[int], None]) -> None:
        mine = [p for p in self._completed_with[layer] if p in gradients]
        if mine:
            # The backward of a leaf is the accumulation of its gradient, hooks and all.
            backward_from(mine, [gradients.pop(p) for p in mine])
        completed(layer)


def _begin(queue: list[tuple[nn.Parameter, Begin]]):
    if not queue:
        return None
    parameter, begin = queue.pop()
    return parameter, begin()
