"""The layers of a block that can be joined, if its form allows it."""

from typing import NamedTuple

import torch
from torch import nn

from ...models.attention import SelfAttention
from ...models.block import MLP, Block
from ...ops.kernel_table import Bound
from ...ops.linear_products import bound_products
from ...ops.norms import NORMS, Norm
from ...tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from .joined_block import JoinedBlock, JoinedLinear, JoinedNorm


class JoinableLayers(NamedTuple):
    """The modules of a block with attention and one dense feed-forward, and what activates it."""

    norm_before: Norm
    qkv: ColumnParallelLinear
    proj: RowParallelLinear
    norm_after: Norm
    fc1: ColumnParallelLinear
    fc2: RowParallelLinear
    activation: Bound

    @property
    def modules(self) -> list[nn.Module]:
        """Return all modules."""
        return [*self[:6]]

    @property
    def parameters(self) -> list[torch.Tensor]:
        """Return all parameters."""
        return [p for layer in self.modules for p in layer.parameters()]

    def joined(self, x: torch.Tensor) -> JoinedBlock | None:
        """Return the layers for inputs like x; None where an implementation has no halves."""
        first = self.norm_before.halves(x, adds=False)
        second = self.norm_after.halves(x, adds=True)
        wide = x.new_empty(*x.shape[:-1], len(self.fc1.weight))
        activation = getattr(self.activation.chosen(wide), "halves", None)
        if first is None or second is None or activation is None:
            return None
        return JoinedBlock(
            JoinedNorm(first, _parameters(self.norm_before), self.norm_before),
            _linear(self.qkv),
            _linear(self.proj),
            JoinedNorm(second, _parameters(self.norm_after), self.norm_after),
            _linear(self.fc1),
            activation,
            _linear(self.fc2),
        )


def joinable_layers(block: Block) -> JoinableLayers | None:
    """Return the layers of a block as it is now; None with norms of outputs, experts, tiles of the feed-forward, an
    adapter, or another layer of any kind."""
    mlp = block.mlp
    attention = block.self_attention
    if block.norms_outputs or type(mlp) is not MLP or mlp.tiles > 1:
        return None
    if type(attention) is not SelfAttention:
        return None
    layers = JoinableLayers(
        block.input_layernorm,
        attention.linear_qkv,
        attention.linear_proj,
        block.pre_mlp_layernorm,
        mlp.linear_fc1,
        mlp.linear_fc2,
        mlp.activation,
    )
    kinds = tuple(map(type, layers))
    return layers if kinds in _KINDS else None


# A program may put modules of any class in place of the layers.
_KINDS = {
    (norm, ColumnParallelLinear, RowParallelLinear) * 2 + (Bound,)
    for norm in NORMS.values()
}


def _parameters(layer: Norm | ColumnParallelLinear | RowParallelLinear):
    return layer.weight, layer.bias


def _linear(layer: ColumnParallelLinear | RowParallelLinear) -> JoinedLinear:
    # Rows are as many in each call: the products need no key.
    return _parameters(layer), layer.call, bound_products()
