"""The layers of a block that can be joined, if its form allows it."""

from typing import NamedTuple

import torch
from torch import nn

from ...host.autograd_functions import halves_of
from ...models.attention import SelfAttention
from ...models.block import MLP, Block
from ...ops.kernel_table import Bound
from ...ops.linear_products import bound_products
from ...ops.norms import NORMS, Norm
from ...tensor_parallel.linear import (
    ColumnParallelLinear,
    Parameters,
    RowParallelLinear,
)
from .joined_block import JoinedBlock, JoinedLinear, JoinedNorm


class JoinableLayers(NamedTuple):
    """The modules of a block with attention and one dense feed-forward, and what activates it."""

    attention: SelfAttention
    norm_before: Norm
    qkv: ColumnParallelLinear
    proj: RowParallelLinear
    norm_after: Norm
    mlp: MLP
    fc1: ColumnParallelLinear
    fc2: RowParallelLinear
    activation: Bound

    @property
    def modules(self) -> list[nn.Module]:
        """Return all modules."""
        return [*self[:-1]]

    @property
    def parameters(self) -> list[torch.Tensor]:
        """Return all parameters."""
        leaves = (
            self.norm_before,
            self.qkv,
            self.proj,
            self.norm_after,
            self.fc1,
            self.fc2,
        )
        return [p for layer in leaves for p in layer.parameters()]

    def joined(self, x: torch.Tensor) -> JoinedBlock | None:
        """Return the layers for inputs like x; None where an implementation has no halves."""
        first = self.norm_before.halves(x, adds=False)
        second = self.norm_after.halves(x, adds=True)
        wide = x.new_empty(*x.shape[:-1], len(self.fc1.weight))
        activation = halves_of(self.activation.chosen(wide))
        if first is None or second is None or activation is None:
            return None
        return JoinedBlock(
            self.attention,
            JoinedNorm(first, _parameters(self.norm_before), self.norm_before),
            _linear(self.qkv),
            _linear(self.proj),
            JoinedNorm(second, _parameters(self.norm_after), self.norm_after),
            _linear(self.fc1),
            activation,
            _linear(self.fc2),
        )


def joinable_layers(block: Block) -> JoinableLayers | None:
    """Return the layers of a block as it is now; None with norms or factors of outputs, experts, tiles of the
    feed-forward, an adapter, or another layer of any kind."""
    # Joined functions have no place for a norm, a factor or experts.
    mlp = block.mlp
    attention = block.self_attention
    if type(mlp) is not MLP or type(attention) is not SelfAttention or mlp.tiles > 1:
        return None
    if (
        block.post_self_attn_layernorm is not None
        or block.post_mlp_layernorm is not None
        or block.multiplier != 1
    ):
        return None
    norm_after = block.pre_mlp_layernorm
    activation = mlp.activation
    if norm_after is None or not isinstance(activation, Bound):
        return None
    # A layer of another kind may compute something else.
    layers = JoinableLayers(
        attention,
        block.input_layernorm,
        attention.linear_qkv,
        attention.linear_proj,
        norm_after,
        mlp,
        mlp.linear_fc1,
        mlp.linear_fc2,
        activation,
    )
    return layers if tuple(map(type, layers)) in _KINDS else None


_LINEARS = (ColumnParallelLinear, RowParallelLinear)
# A program may put modules of any class in place of the layers.
_KINDS = {
    (SelfAttention, norm, *_LINEARS, norm, MLP, *_LINEARS, Bound)
    for norm in NORMS.values()
}


def _parameters(layer: Norm | ColumnParallelLinear | RowParallelLinear) -> Parameters:
    return layer.weight, layer.bias


def _linear(layer: ColumnParallelLinear | RowParallelLinear) -> JoinedLinear:
    # Rows are as many in each call: the products need no key.
    return _parameters(layer), layer.call, bound_products()
