"""Dropout of the input of an adapter, whose mask is a function of (seed, layer, sample, position, channel).

A linear layer is called without the micro-batch. The attention and the feed-forward that contain it are called with
it, also where backward computes them again: hooks on these two keep the micro-batch of the call that is under way.
"""

from dataclasses import dataclass

import torch
from torch import nn

from ...batch.batch import Batch
from ...mpu.context import ParallelContext
from ...ops.dropout import apply_mask, dropout, hidden_mask, sample_keys


class BatchUnderWay:
    """The micro-batch of the call of a block that is under way."""

    def __init__(self):
        self.batch: Batch | None = None

    def follow(self, block: nn.Module) -> None:
        """Keep the micro-batches of the calls of the block's halves, `forward(x, batch, ..)`."""
        for half in (block.self_attention, block.mlp):
            half.register_forward_pre_hook(self._keep)

    def _keep(self, module: nn.Module, inputs: tuple) -> None:
        self.batch = inputs[1]


@dataclass(frozen=True)
class AdapterDropout:
    """In training, sets elements of x to 0 with probability p, and scales the others.

    site    name of the adapter, part of the key of its masks
    width   channels of the whole input if tensor-parallel ranks divide them, so that each rank holds all tokens of
            the batch; None: x has all channels of this rank's slice of the sequence
    """

    p: float
    site: str
    width: int | None
    ctx: ParallelContext
    under_way: BatchUnderWay

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [s(/t), b, in], or [s, b, in/t] with `width`."""
        batch = self.under_way.batch
        if self.p == 0 or not batch.training:
            return x
        ctx = self.ctx
        if self.width is None:
            rows, picked = batch.positions(ctx.slice.rows(batch.seq_length))
            return dropout(
                x, self.p, ctx.seed, self.site, batch.sample_ids, rows, picked
            )
        # Each of the ranks that divide the channels draws the masks of all, and uses its own.
        rows, picked = batch.positions()
        keys = sample_keys(ctx.seed, self.site, batch.sample_ids)
        *outer, held = x.shape
        whole = hidden_mask((*outer, self.width), self.p, keys, rows, picked, x.device)
        first = ctx.tp.rank * held
        return apply_mask(x, whole[..., first : first + held].contiguous(), self.p)
