"""The feed-forward half of a block: h → f → h, with an activation of one or of two halves between."""

import torch
from torch import nn

from ..data.batch import Batch
from ..ops.activation import ACTIVATIONS
from ..tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from .layer import Placement, check_divides, pick


class MLP(nn.Module):
    """x [s(/t), b, h] → [s(/t), b, h]. A gated activation takes [gate; up], so its fc1 has twice the rows, in two parts."""

    def __init__(self, config, name: str, placement: Placement, *, output_std: float):
        super().__init__()
        check_divides("ffn_hidden_size", config.ffn_size, placement.tp, "each rank holds an equal part of it")
        self.activation = pick(ACTIVATIONS, "activation", config.activation)
        parts = self.activation.parts
        to = dict(group=placement.tp, bias=config.add_bias_linear, sequence_parallel=placement.sequence_parallel,
                  dtype=placement.dtype, device=placement.device)
        self.linear_fc1 = ColumnParallelLinear(config.hidden_size, parts * config.ffn_size, name=f"{name}.linear_fc1",
                                               init_std=config.init_method_std, parts=parts, **to)
        self.linear_fc2 = RowParallelLinear(config.ffn_size, config.hidden_size, name=f"{name}.linear_fc2",
                                            init_std=output_std, **to)

    def forward(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        return self.linear_fc2(self.activation(self.linear_fc1(x)))             # [s, b, f/t] between
