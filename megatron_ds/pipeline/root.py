"""`Root`: where a backward starts, once the gradients to start from are there.

`torch.autograd.backward(edge, gradient)` does the same, and at its first call loads torch.fx and sympy to compare shapes:
a second of every process. A root is a scalar, which needs no gradient to start from, so nothing is loaded.
"""

import torch
from torch import Tensor
from torch.autograd.function import Function
from torch.autograd.graph import GradientEdge, get_gradient_edge


class Root:
    """The place in the graph of `tensors` from where a backward starts. It keeps none of them.

    edge   what `torch.autograd.backward` and `torch.autograd.grad` take, without a gradient
    """

    def __init__(self, *tensors: Tensor):
        self._gradients: list[Tensor] = []         # shared with the node; the root itself there would make a cycle
        self.edge: GradientEdge = get_gradient_edge(_Join.apply(self._gradients, *tensors))

    def give(self, *gradients: Tensor) -> None:
        """The gradients of the tensors, shaped like them, in their order; before each backward, which forgets them."""
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


def backward_from(tensors: list[Tensor], gradients: list[Tensor]) -> None:
    """A backward from tensors at hand: the gradients go to where they accumulate, in the order of the tensors."""
    with torch.enable_grad():
        root = Root(*tensors)
    root.give(*gradients)
    torch.autograd.backward(root.edge)
