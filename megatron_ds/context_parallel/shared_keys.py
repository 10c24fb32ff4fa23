"""`SharedKeys`: attention of a rank's own queries to the keys of all ranks, which pass by block by block.

Any number of heads; attention of each query is computed on one rank. Forward keeps what attention of one
process keeps of the rank's tokens: q, k, v, the output and its log-sum-exp. In backward the keys pass by once
more.
"""

from dataclasses import dataclass

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


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, sink, shared, visible, scoring, keep):
        own = torch.stack((k, v))
        here = shared.positions[shared.group.rank]
        partial = PartialAttention(q, here, visible, scoring, keep)
        for owner, (keys, values) in shared.exchange.forward(own, shared.group):
            partial.add(keys, values, shared.positions[owner])
        out, sums = partial.result()
        ctx.save_for_backward(q, own, sink, out, sums)
        ctx.shared = shared
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
            partial.add(*block, shared.positions[owner], gradient)

        dk, dv = shared.exchange.backward(own, shared.group, add).to(own.dtype)
        dsink = None if sink is None else partial.of_sink(sink)
        return partial.dq.to(q.dtype), dk, dv, dsink, None, None, None, None
