"""`MadeKeys`: keys and values of a block of tokens, made of two parts of these where they are needed.

The parts travel among context-parallel ranks in place of keys and values, where they are less. So each rank makes keys
and values of all tokens, block by block, and keeps none of them: backward makes them again.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from ...context_parallel.key_maker import AddOfBlock
from ...tensor_parallel.weight_grad import GradientSums, gradient_sums


@dataclass(frozen=True)
class MadeKeys:
    """A `context_parallel.key_maker.KeyMaker` by a differentiable function.

    make         the two parts → keys [s, b, g, d] and values [s, b, g, e]. Its collectives run once for each block,
                 forward and backward, in the same order on all ranks of their group
    parameters   those that it reads
    value_width  e
    """

    make: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    parameters: tuple[torch.Tensor, ...]
    value_width: int

    @property
    def trained(self) -> tuple[torch.Tensor, ...]:
        """The parameters that have gradients."""
        return tuple(p for p in self.parameters if p.requires_grad)

    def made(self, parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of a block, contiguous."""
        first, second = parts
        keys, values = self.make(first, second)
        return keys.contiguous(), values.contiguous()

    def sums(self) -> AbstractContextManager[GradientSums]:
        """Return a context in which the gradients of the parameters are sums over blocks."""
        return gradient_sums(self.trained)

    def add_gradients(
        self,
        parts: Sequence[torch.Tensor],
        totals: Sequence[torch.Tensor],
        add: AddOfBlock,
        weights: GradientSums,
    ) -> None:
        """Make keys and values of a block again, and add the gradients of its parts to `totals`, fp32.

        Those of the parameters are added to `weights`.
        """
        given = [part.detach().requires_grad_() for part in parts]
        with torch.enable_grad():
            made = self.made(given)
        gradients = [torch.zeros_like(t, dtype=torch.float32) for t in made]
        keys, values = (t.detach() for t in made)
        add(keys, values, gradients)
        # Through what made them.
        into = [d.to(t.dtype) for d, t in zip(gradients, made, strict=True)]
        inputs = [*given, *self.trained]
        found = torch.autograd.grad(made, inputs, into, allow_unused=True)
        for total, gradient in zip(totals, found):
            total.add_(gradient)
        for parameter, gradient in zip(self.trained, found[len(given) :], strict=True):
            weights.add(parameter, gradient)
