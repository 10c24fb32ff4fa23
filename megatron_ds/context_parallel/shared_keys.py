"""`SharedKeys`: attention of a rank's own queries to the keys of all ranks, which pass by block by block.

Any number of heads; attention of each query is computed on one rank. Forward keeps what attention of one
process keeps of the rank's tokens: q, k, v, the output and its log-sum-exp. In backward the keys pass by once
more.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.autograd.function import once_differentiable

from ..mpu.group import Group
from ..ops.attention_tiles import Runs
from ..ops.key_visibility import KeyVisibility
from ..ops.partial_attention import Keep, PartialAttention, PartialGradients
from ..ops.scoring import PLAIN, Scoring
from .block_exchange import BlockExchange


@dataclass(frozen=True)
class SharedKeys:
    """A call is collective over `group`, and so is its backward.

    positions  of the tokens of each rank of the group
    """

    group: Group
    exchange: BlockExchange
    positions: tuple[Runs, ...]

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        visible: KeyVisibility,
        scoring: Scoring = PLAIN,
        keep: Keep | None = None,
    ) -> torch.Tensor:
        """q [s, b, n, d], k and v [s, b, g, d] of this rank's tokens → [s, b, n * d].

        keep: what dropout keeps of a tile; None without dropout
        """
        return _Attention.apply(q, k, v, scoring.sink, self, visible, scoring, keep)


class _Pair(NamedTuple):
    """Shapes of keys [s, b, g, d] and values, which travel in one block; their widths may differ."""

    keys: torch.Size
    values: torch.Size

    def joined(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Return the block, flat and contiguous."""
        block = k.new_empty(self.keys.numel() + self.values.numel())
        for part, t in zip(self.parts(block), (k, v), strict=True):
            part.copy_(t)
        return block

    def parts(self, block: torch.Tensor) -> list[torch.Tensor]:
        """Return keys and values of a block, views."""
        flat = block.split([shape.numel() for shape in self])
        return [t.view(shape) for t, shape in zip(flat, self, strict=True)]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, sink, shared, visible, scoring, keep):
        pair = _Pair(k.shape, v.shape)
        own = pair.joined(k, v)
        here = shared.positions[shared.group.rank]
        partial = PartialAttention(q, here, visible, scoring, keep, v.shape[3])
        for owner, block in shared.exchange.forward(own, shared.group):
            partial.add(*pair.parts(block), shared.positions[owner])
        out, sums = partial.result()
        ctx.save_for_backward(q, own, sink, out, sums)
        ctx.shared = shared
        ctx.pair = pair
        ctx.settings = visible, scoring, keep
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        q, own, sink, out, sums = ctx.saved_tensors
        shared = ctx.shared
        visible, scoring, keep = ctx.settings
        partial = PartialGradients(
            q,
            shared.positions[shared.group.rank],
            visible,
            scoring,
            (out, sums),
            dout.contiguous(),
            keep,
        )

        def add(owner, block, gradient):
            keys, values = ctx.pair.parts(block)
            totals = ctx.pair.parts(gradient)
            partial.add(keys, values, shared.positions[owner], totals)

        total = shared.exchange.backward(own, shared.group, add).to(own.dtype)
        dk, dv = ctx.pair.parts(total)
        dsink = None if sink is None else partial.of_sink(sink)
        return partial.dq.to(q.dtype), dk, dv, dsink, None, None, None, None
