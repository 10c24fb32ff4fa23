"""`deepspeed.zero.TiledLinear`: a linear layer of several small ones, which ZeRO stage 3 gathers one by one.

    y = x Wᵀ + b, W [out_features, in_features] cut into out_splits × in_splits tiles

The tiles of a row have the columns of W that meet their part of x, and their outputs are summed; the last one
has the bias. Parts differ by at most one element, the larger ones first.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from ...errors import ConfigError
from .functions import partition_uniform


class TilingError(ConfigError, RuntimeError):
    """A layer cannot be cut into so many tiles; DeepSpeed raises RuntimeError."""


class TiledLinear(nn.Module):
    """A linear layer in tiles. Tensors are x [..., in_features] and y [..., out_features].

    in_splits, out_splits   tiles of a row, and rows
    input_is_already_split  `forward` gets the in_splits parts of x in a list
    combine_out_splits      False: `forward` returns the out_splits parts of y in a list
    linear_cls   makes a tile from (in_features, out_features, bias=…) and **options
    init_linear  a linear layer whose values the tiles get

    Attributes: `linears[row][column]`, the tiles; `in_parts` and `out_parts`, bounds of the parts.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: Callable[..., nn.Module] = nn.Linear,
        init_linear: nn.Module | None = None,
        **options: Any,
    ):
        """Raises TilingError for more parts than elements."""
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.use_bias = bias
        self.input_is_already_split = input_is_already_split
        self.combine_out_splits = combine_out_splits
        self.in_parts = _bounds("in", in_features, in_splits)
        self.out_parts = _bounds("out", out_features, out_splits)
        self.linears = nn.ModuleList(
            self._row(rows, linear_cls, options) for rows in _sizes(self.out_parts)
        )
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def forward(self, x: Any) -> Any:
        """y, or its parts."""
        rows = [_sum(outputs) for outputs in self._outputs(x)]
        return torch.cat(rows, dim=-1) if self.combine_out_splits else rows

    @property
    def _rows(self) -> list[list[Any]]:
        """The tiles, row by row: modules of the class that the program gave."""
        return [list(row.children()) for row in self.linears]

    @torch.no_grad()
    def copy_params_from(self, other: Any) -> None:
        """Give the tiles the values of a linear layer of the same sizes, whose parameters are whole."""
        for row, (first, last) in zip(self._rows, pairwise(self.out_parts)):
            for tile, (left, right) in zip(row, pairwise(self.in_parts)):
                tile.weight.copy_(other.weight[first:last, left:right])
            if self.use_bias:
                row[-1].bias.copy_(other.bias[first:last])

    def extra_repr(self) -> str:
        """Sizes and splits."""
        splits = (
            f"in_splits={len(self.in_parts) - 1}, out_splits={len(self.out_parts) - 1}"
        )
        return f"in_features={self.in_features}, out_features={self.out_features}, {splits}"

    def _row(
        self, rows: int, linear_cls: Callable[..., nn.Module], options: dict[str, Any]
    ) -> nn.ModuleList:
        columns = _sizes(self.in_parts)
        last = len(columns) - 1
        return nn.ModuleList(
            linear_cls(size, rows, bias=self.use_bias and i == last, **options)
            for i, size in enumerate(columns)
        )

    def _outputs(self, x: Any) -> list[list[Any]]:
        """Return the outputs of the tiles, row by row."""
        parts = x
        if not self.input_is_already_split:
            parts = x.split(_sizes(self.in_parts), dim=-1)
        return [[tile(part) for tile, part in zip(row, parts)] for row in self._rows]


class TiledLinearReturnBias(TiledLinear):
    """A `TiledLinear` of layers that return (output, bias), as Megatron's do with skip_bias_add.

    `forward` returns (y, bias); bias is None where the layers have none.
    """

    def forward(self, x: Any) -> Any:
        """(y, bias), or the parts of both."""
        rows = self._outputs(x)
        outputs = [_sum([output for output, _ in row]) for row in rows]
        biases = [row[-1][1] for row in rows]
        if not self.combine_out_splits:
            return outputs, biases
        bias = None if biases[0] is None else torch.cat(biases)
        return torch.cat(outputs, dim=-1), bias


def split_tensor_along_last_dim(
    tensor: torch.Tensor,
    partitions: Sequence[int],
    contiguous_split_chunks: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Return the parts of a tensor between bounds of its last dimension."""
    parts = tensor.split(_sizes(partitions), dim=-1)
    return tuple(p.contiguous() for p in parts) if contiguous_split_chunks else parts


def _bounds(side: str, size: int, parts: int) -> list[int]:
    if not 1 <= parts <= size:
        raise TilingError(
            f"{side}_splits={parts}: {side}_features={size} are cut into 1 to {size} parts. "
            "Use a number among these."
        )
    return partition_uniform(size, parts)


def _sizes(bounds: Sequence[int]) -> list[int]:
    return [last - first for first, last in pairwise(bounds)]


def _sum(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack(list(tensors)).sum(dim=0) if len(tensors) > 1 else tensors[0]
