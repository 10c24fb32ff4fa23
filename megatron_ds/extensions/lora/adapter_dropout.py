"""Dropout of the input of an adapter, whose mask is a function of (seed, layer, sample, position, channel), and of
the expert if the adapter belongs to one.

A linear layer is called without the micro-batch. The attention and the feed-forward that contain it are called with
it, also where backward computes them again: hooks on these two keep the micro-batch of the call that is under way.
Rows of experts are in another order, and of tokens of other ranks: the key of each token, int64, travels with it.
"""

from dataclasses import dataclass

import torch
from torch import nn

from ...batch.batch import Batch
from ...mpu.context import ParallelContext
from ...ops.dropout import apply_mask, dropout, hidden_mask, sample_keys
from ...ops.grouped import RowRuns
from ...ops.keep_tables import keep_rows
from ...ops.keyed_random import random_numbers


class BatchUnderWay:
    """The micro-batch of the call of a block that is under way."""

    def __init__(self):
        self.batch: Batch | None = None

    def follow(self, block: nn.Module) -> None:
        """Keep the micro-batches of the calls of the block's halves, `forward(x, batch, ..)`: both, or the one that
        it has."""
        halves = dict(block.named_children())
        for half in {"self_attention", "mlp"} & halves.keys():
            halves[half].register_forward_pre_hook(self._keep)

    @property
    def current(self) -> Batch:
        """The micro-batch of the call; only inside of a followed block."""
        assert self.batch is not None, "the block is not followed, or is not called"
        return self.batch

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
        if self.p == 0:
            return x
        batch = self.under_way.current
        if not batch.training:
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


@dataclass(frozen=True)
class TokenKeys:
    """Keys of random numbers of the tokens that experts drop elements of, by (seed, sample, position)."""

    ctx: ParallelContext

    def __call__(self, batch: Batch) -> torch.Tensor | None:
        """int64 [T] of the tokens of this rank's slice of the sequence; None outside of training."""
        if not batch.training:
            return None
        ctx = self.ctx
        rows, picked = batch.positions(ctx.slice.rows(batch.seq_length))
        samples = sample_keys(ctx.seed, "tokens of experts", batch.sample_ids)
        device = batch.tokens.device
        keys = random_numbers(samples, len(rows), device, first=rows.start)
        if picked is not None:
            keys = keys.gather(1, picked)
        return keys.t().flatten()  # [s, b], as of hidden states


@dataclass(frozen=True)
class ExpertDropout:
    """In training, sets elements of rows of experts to 0 with probability p, and scales the others.

    site       name of the adapters, part of the key of their masks
    experts    of the layer; local: global numbers of those of this rank
    is_cut     whether the ranks that divide an expert divide the channels
    """

    p: float
    site: str
    experts: int
    local: range
    is_cut: bool
    ctx: ParallelContext

    def __call__(self, x: torch.Tensor, runs: RowRuns) -> torch.Tensor:
        """x [n, in(/t)], rows of the experts in `runs`."""
        if self.p == 0 or runs.token_keys is None:
            return x
        # The keys of token and expert together are that of a row.
        of_site = [(self.ctx.seed, self.site)]
        of_experts = random_numbers(of_site, self.experts, x.device)[0]
        own = of_experts[self.local.start : self.local.stop]
        rows, held = x.shape
        of_rows = own.repeat_interleave(runs.on_device, output_size=rows)
        # Ranks that divide the channels draw their own.
        first = self.ctx.etp.rank * held if self.is_cut else 0
        mask = keep_rows(self.p, runs.token_keys ^ of_rows, range(first, first + held))
        return apply_mask(x, mask, self.p)
