"""A linear layer that every tensor-parallel rank holds whole: for products too small to be worth a message."""

import torch
from torch import nn

from ..mpu.group import solo
from ..mpu.param_spec import Init, ParamSpec
from ..ops.parameter import new_parameter
from .linear import column_linear


class ReplicatedLinear(nn.Module):
    """y = x Wᵀ + b: [.., in] → [.., out] on each rank by itself; no communication."""

    def __init__(self, in_features: int, out_features: int, *, name: str, init_std: float,
                 partial_over: tuple[str, ...] = (), dtype: torch.dtype = torch.float32, device=None):
        """partial_over: ("tp",) where x is a slice of the sequence; see `ParamSpec`."""
        super().__init__()
        make = lambda leaf, shape, init, decay: new_parameter(
            ParamSpec(f"{name}.{leaf}", shape, init, partial_over=partial_over, decay=decay), dtype=dtype, device=device)
        self.weight = make("weight", (out_features, in_features), Init("normal", init_std), True)
        self.bias = make("bias", (out_features,), Init("zeros"), False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return column_linear(x, self.weight, self.bias, solo("tp"))
