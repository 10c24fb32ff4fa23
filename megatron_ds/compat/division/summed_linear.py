"""A linear layer whose inputs are divided over ranks: the products are summed, then the bias is added once."""

from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ...errors import ConfigError
from ...mpu.group import Group
from ...mpu.regions import reduce_from_region
from .split_plan import is_transposed


class SummedLinear(nn.Module):
    """The first base of the class of such a layer. Its bias is whole on every rank, and so is the bias's gradient.

    ranks  the ranks that hold the other inputs
    """

    ranks: Group
    weight: nn.Parameter
    bias: nn.Parameter

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the whole result. Collective over `ranks`.

        Shape [..., inputs of this rank] → [..., outputs].
        """
        weight = self.weight.t() if is_transposed(self) else self.weight
        whole = reduce_from_region(functional.linear(x, weight), self.ranks)
        return whole + self.bias.to(whole.dtype)


def sum_before_bias(name: str, linear: nn.Module, ranks: Group) -> None:
    """Let a linear layer with a bias sum its products. Raises ConfigError where it has a forward of its own."""
    kind: Any = type(linear)
    plain = kind.forward is nn.Linear.forward or kind.__name__ == "Conv1D"
    if not plain:
        raise ConfigError(
            f"{name} is {kind.__name__}, a linear layer with a bias and a forward of its own, which cannot add the "
            "bias after the sum over tensor-parallel ranks. Give a tensor-parallel size of 1, or use ZeRO stage 3."
        )
    linear.__class__ = _summed_class(kind)
    vars(linear)["ranks"] = ranks


@cache
def _summed_class(kind: type) -> type:
    """Make the class of a linear layer with the forward of `SummedLinear`."""
    return type(f"Summed{kind.__name__}", (SummedLinear, kind), {})
