"""Dropout of the input of an adapter, whose mask is a function of (seed, layer, sample, position, channel).

A linear layer is called without the micro-batch. The attention and the feed-forward that contain it are called with
it, also where backward computes them again: hooks on these two keep the micro-batch of the call that is under way.
"""

from dataclasses import dataclass

import torch
from torch import nn

from ...batch.batch import Batch
from ...mpu.context import ParallelContext
from ...ops.dropout import dropout, dropout_of_columns


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

    site        name of the adapter, part of the key of its masks
    is_divided  tensor-parallel ranks divide the channels of the input, so that each holds all tokens of the batch;
                False: x has all channels of this rank's slice of the sequence
    """

    p: float
    site: str
    is_divided: bool
    ctx: ParallelContext
    under_way: BatchUnderWay

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [s(/t), b, in], or [s, b, in/t] if they are divided."""
        batch = self.under_way.batch
        if self.p == 0 or not batch.training:
            return x
        ctx = self.ctx
        if not self.is_divided:
            rows, picked = batch.positions(ctx.slice.rows(batch.seq_length))
            return dropout(
                x, self.p, ctx.seed, self.site, batch.sample_ids, rows, picked
            )
        rows, picked = batch.positions()
        return dropout_of_columns(
            x,
            (ctx.tp.rank, ctx.tp.size),
            self.p,
            ctx.seed,
            self.site,
            batch.sample_ids,
            rows,
            picked,
        )
