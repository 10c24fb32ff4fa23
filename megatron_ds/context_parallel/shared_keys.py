"""`SharedKeys`: attention of a rank's own queries to the keys of all ranks, which pass by block by block.

Any number of heads; attention of each query is computed on one rank. Forward keeps what attention of one
process keeps of the rank's tokens: q, k, v, the output and its log-sum-exp. In backward the keys pass by once
more. Where less travels in place of keys and values, these are made of each block when it is here
(`key_maker.KeyMaker`), forward and once more in backward.
"""

from contextlib import nullcontext
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
from .key_maker import KeyMaker


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
        maker: KeyMaker | None = None,
    ) -> torch.Tensor:
        """q [s, b, n, d], k and v [s, b, g, d] of this rank's tokens → [s, b, n * d].

        keep: what dropout keeps of a tile; None without dropout
        maker: makes keys and values of k and v, which then are two parts of any shapes; None: they are keys and values
        """
        settings = _Settings(self, visible, scoring, keep, maker)
        read = () if maker is None else maker.trained
        return _Attention.apply(q, k, v, scoring.sink, settings, *read)


class _Settings(NamedTuple):
    """What a call has besides tensors."""

    shared: SharedKeys
    visible: KeyVisibility
    scoring: Scoring
    keep: Keep | None
    maker: KeyMaker | None


class _Pair(NamedTuple):
    """Shapes of keys [s, b, g, d] and values, which travel in one block, or of the two parts that they are made of."""

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
    def forward(ctx, q, k, v, sink, settings, *trained):
        shared, visible, scoring, keep, maker = settings
        pair = _Pair(k.shape, v.shape)
        own = pair.joined(k, v)
        here = shared.positions[shared.group.rank]
        width = v.shape[3] if maker is None else maker.value_width
        partial = PartialAttention(q, here, visible, scoring, keep, width)
        for owner, block in shared.exchange.forward(own, shared.group):
            parts = pair.parts(block)
            pass_by = parts if maker is None else maker.made(parts)
            partial.add(*pass_by, shared.positions[owner])
        out, sums = partial.result()
        ctx.save_for_backward(q, own, sink, out, sums)
        ctx.pair = pair
        ctx.settings = settings
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        q, own, sink, out, sums = ctx.saved_tensors
        shared, visible, scoring, keep, maker = ctx.settings
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
            parts = ctx.pair.parts(block)
            totals = ctx.pair.parts(gradient)
            of_block = lambda k, v, dkv: partial.add(k, v, shared.positions[owner], dkv)
            if maker is None:
                of_block(*parts, totals)
            else:
                maker.add_gradients(parts, totals, of_block, weights)

        # Weights that keys and values are made with have one gradient, the sum over the blocks.
        with nullcontext() if maker is None else maker.sums() as weights:
            total = shared.exchange.backward(own, shared.group, add).to(own.dtype)
        delivered = () if maker is None else weights.deliver()
        dk, dv = ctx.pair.parts(total)
        dsink = None if sink is None else partial.of_sink(sink)
        return partial.dq.to(q.dtype), dk, dv, dsink, None, *delivered
