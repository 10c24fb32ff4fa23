"""Backward of one stage: where it starts (`Root`), what starts on its way (`attach`), and its halves
(`SplitBackward`).

`torch.autograd.backward(edge, gradient)` loads torch.fx and sympy at its first call to compare shapes, which
takes a second of every process. A `Root` is a scalar, which needs no gradient to start from, so nothing is
loaded.

Halves of a backward (Qi et al. 2024, arXiv:2401.10241, section 2):

    input half   the gradients of the activations, down to that of the stage's input; a neighbour waits for it
    weight half  the gradients of the parameters; at any later time, micro-batches in their order

While the input half runs, each parameter of the stage has a `Detour` to a queue. A layer whose weight
gradient is worth deferring appends (parameter, begin); begin() starts collectives and returns a function that
computes the gradient, or adds it to the parameter's buffer and returns None. Gradients that other layers
compute at once (sums for biases and norms) are returned by autograd instead of being accumulated. Either way
gradients are *delivered* in the weight half alone: accumulated, and announced to hooks, micro-batch by
micro-batch and layer by layer from the last to the first, as in a whole backward and with the same bits.

Between the halves a micro-batch keeps the two factors of each deferred gradient, and the small gradients.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.autograd.function import Function
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ..host.autograd_functions import direct_apply
from ..mpu.managed_parameter import Detour, Finish, Queue, detours


class Root:
    """The place in the graph of `tensors` where a backward starts. It keeps none of them alive.

    edge   for `torch.autograd.backward` and `torch.autograd.grad`, without a gradient
    """

    def __init__(self, *tensors: Tensor):
        self._gradients: list[
            Tensor
        ] = []  # shared with the node; a reference to the root would be a cycle
        self.edge: GradientEdge = get_gradient_edge(_join(self._gradients, *tensors))

    def give(self, *gradients: Tensor) -> None:
        """Set the gradients of the tensors, in their order and shapes; each backward consumes them."""
        self._gradients[:] = gradients


class _Join(Function):
    @staticmethod
    def forward(ctx, gradients: list[Tensor], *tensors: Tensor) -> Tensor:
        ctx.gradients = gradients
        return tensors[0].new_zeros(())

    @staticmethod
    def backward(ctx, _one: Tensor):
        given = tuple(ctx.gradients)
        ctx.gradients.clear()
        return None, *given


_join = direct_apply(_Join)


def attach(x: Tensor, terms: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor:
    """x, in whose backward those of the scalars `terms` start, each from its gradient.

    The terms then run in the turn of the layer that returned x: after the gradient of x has arrived, and so
    while the parameters of that layer are gathered.
    """
    return _Attach.apply(tuple(gradients), x, *terms)


class _Attach(Function):
    @staticmethod
    def forward(
        ctx, gradients: tuple[Tensor, ...], x: Tensor, *terms: Tensor
    ) -> Tensor:
        ctx.gradients = gradients
        # Not a view to autograd: the next layer may change it in place.
        return x.detach()

    @staticmethod
    def backward(ctx, dx: Tensor):
        return None, dx, *ctx.gradients


def backward_from(tensors: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """A backward from `tensors`; gradients accumulate in the leaves, in the order of the tensors."""
    with torch.enable_grad():
        root = Root(*tensors)
    root.give(*gradients)
    torch.autograd.backward(root.edge)


class SplitBackward:
    """The halves of the micro-batches of one stage; `modules` are its layers."""

    def __init__(self, modules: Sequence[nn.Module]):
        holders: dict[Tensor, list[int]] = defaultdict(list)
        for layer, module in enumerate(modules):
            for parameter in module.parameters():
                holders[parameter].append(layer)
        self.num_layers = len(modules)
        self.parameters = list(holders)
        self._layer_of = {
            p: layers[0] for p, layers in holders.items() if len(layers) == 1
        }
        # layer → parameters of which it is the last layer that backward passes
        self._completed_with: list[list[Tensor]] = [[] for _ in modules]
        for p, layers in holders.items():
            self._completed_with[layers[0]].append(p)
        self.waiting: dict[int, tuple[Queue, dict[Tensor, Tensor]]] = {}

    def input_half(
        self, microbatch: int, edge: GradientEdge | None, x: Tensor | None
    ) -> Tensor | None:
        """Return the gradient of x, a leaf, in a backward from the `Root` at `edge`.

        The weight half waits under the micro-batch's number. It is empty where edge is None or no parameter
        and no input requires a gradient: frozen layers.
        """
        self.waiting[microbatch] = [], {}
        queue: Queue = []
        wanted = [p for p in self.parameters if p.requires_grad]
        inputs = wanted if x is None else [*wanted, x]
        if edge is None or not inputs:
            return None
        with detours(dict.fromkeys(wanted, Detour(queue))):
            found = torch.autograd.grad(edge, inputs, allow_unused=True)
        self.waiting[microbatch] = (
            queue,
            {p: g for p, g in zip(wanted, found) if g is not None},
        )
        return None if x is None else found[-1]

    @torch.no_grad()  # as autograd does in a backward
    def weight_half(self, microbatch: int, completed: Callable[[int], None]) -> None:
        """Deliver a micro-batch's gradients; `completed` is called after each layer, last to first."""
        queue, gradients = self.waiting.pop(microbatch)
        queue.reverse()  # taken from the end, so that factors are freed one by one
        layer = self.num_layers - 1
        begun = _begin(queue)
        while begun is not None:
            parameter, finish = begun
            while layer > self._layer_of.get(parameter, layer):
                self._complete(layer, gradients, completed)
                layer -= 1
            begun = _begin(queue)  # one ahead: it gathers while this one computes
            gradient = finish()
            del finish
            if gradient is not None:
                gradients[parameter] = (
                    gradients[parameter] + gradient
                    if parameter in gradients
                    else gradient
                )
        for rest in range(layer, -1, -1):
            self._complete(rest, gradients, completed)

    def _complete(
        self,
        layer: int,
        gradients: dict[Tensor, Tensor],
        completed: Callable[[int], None],
    ) -> None:
        mine = [p for p in self._completed_with[layer] if p in gradients]
        if mine:
            # The backward of a leaf accumulates its gradient and runs its hooks.
            backward_from(mine, [gradients.pop(p) for p in mine])
        completed(layer)


def _begin(queue: Queue) -> tuple[Tensor, Finish] | None:
    if not queue:
        return None
    parameter, begin = queue.pop()
    return parameter, begin()
