"""Random layer-wise token dropping (Yao et al. 2022, arXiv:2211.11586): a block that sees a random part of the tokens.

    x [s, b, h] ──┬── k tokens of each sample, in their order ── block ── [k, b, h] ──┐
                  └── all ───────────────────────────────────────── written over ─────┴── [s, b, h]

The others pass by unchanged. Each block draws its own tokens for each sample, from (seed, name of the block, sample) alone: so
tensor-parallel ranks, pipeline stages, a recomputed forward and a resumed run agree without a word. The block is any layer: it
gets hidden states of k tokens, and a batch that says where they stand, for rotary positions, attention masks and dropout.

With sequence parallelism a rank holds s/t positions, and of the kept tokens however many fell there; the block wants k/t on
each. Note: how tokens travel. Each rank lays its own kept tokens into k rows, zeros between, in the order of the sequence;
a reduce-scatter of these gives each rank the next k/t of them, exactly, for one rank alone adds something to a row. Back the
other way: an all-gather, from which each rank picks what stands in its slice. Backward is the same two, exchanged.

Letters: s positions, b samples, k kept tokens of each sample, t tensor-parallel ranks, h channels.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from ..data.batch import Batch
from ..errors import LayoutError
from ..mpu.context import ParallelContext
from ..mpu.regions import gather_from_sequence_region, reduce_scatter_to_sequence_region
from ..ops.random import random_subset
from .kv_cache import KVCache
from .layer import Layer


def with_random_ltd(layers: Sequence[Layer], blocks: Collection[int], ctx: ParallelContext) -> list[Layer]:
    """The layers, in which the blocks with these numbers drop tokens."""
    numbers = {layer.name: i for i, layer in enumerate(layer for layer in layers if layer.is_block)}
    return [replace(layer, make=partial(_wrap, layer, ctx), drops_tokens=True) if numbers.get(layer.name) in blocks else layer
            for layer in layers]


def _wrap(layer: Layer, ctx: ParallelContext) -> nn.Module:
    return RandomLTD(layer.make(), layer.name, ctx)


class RandomLTD(nn.Module):
    """x [s(/t), b, h] → the same. All tokens go through the block where `batch.kept_tokens` says so, and in evaluation."""

    def __init__(self, block: nn.Module, name: str, ctx: ParallelContext):
        super().__init__()
        self.block, self.name, self.ctx = block, name, ctx

    def set_recompute(self, granularity: str | None) -> None:
        """As of `Block`."""
        self.block.set_recompute(granularity)

    def forward(self, x: torch.Tensor, batch: Batch, cache: KVCache | None = None) -> torch.Tensor:
        kept = batch.kept_tokens
        if kept is None or kept >= batch.seq_length or not batch.training:
            return self.block(x, batch, cache)
        index = self.draw(kept, batch)                                          # [b, k]
        rows, inside = self.rows(index, x)
        group = self.ctx.sequence_group
        x, part = _Pick.apply(x, rows, inside, kept)                            # part [k, b, h]
        if group is not None:
            part = reduce_scatter_to_sequence_region(part, group)               # [k/t, b, h]
        part = self.block(part, batch.at_places(index))
        if group is not None:
            part = gather_from_sequence_region(part, group)                     # [k, b, h]
        return _Put.apply(x, part, rows, inside)

    def draw(self, kept: int, batch: Batch) -> torch.Tensor:
        """Which tokens of each sample: int64 [b, k], ascending."""
        size = self.ctx.slice.tensor.size
        if kept % size:
            raise LayoutError(f"{self.name}: {kept} kept tokens are not divisible by {size}, the number of tensor-parallel "
                              "ranks that share a sequence. Keep a multiple of it.")
        keys = [(self.ctx.seed, "random_ltd", self.name, int(sample)) for sample in batch.sample_ids]
        return random_subset(keys, kept, batch.seq_length, batch.tokens.device)

    def rows(self, index: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Of the kept tokens, in the order of [k, b]: their rows in x laid flat, [s(/t) b, h], one beyond the last for tokens
        that other ranks hold; and whether this rank holds each, None when it holds all."""
        held, samples = x.shape[:2]
        column = torch.arange(samples, device=index.device)
        rank, size = self.ctx.slice.tensor
        if size == 1:
            return (index.t() * samples + column).flatten(), None
        here = index.t() - rank * held
        inside = ((here >= 0) & (here < held)).flatten()
        rows = (here * samples + column).flatten()
        return rows.where(inside, held * samples), inside


class _Pick(torch.autograd.Function):
    # The whole x goes through, to `_Put`, so that backward writes one gradient into the other instead of adding two.

    @staticmethod
    def forward(ctx, x, rows, inside, kept):
        ctx.save_for_backward(rows, inside)
        return x.view_as(x), _picked(x, rows, inside, kept)

    @staticmethod
    def backward(ctx, dx, dpart):
        return _put(dx, dpart, *ctx.saved_tensors), None, None, None


class _Put(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, part, rows, inside):
        ctx.save_for_backward(rows, inside)
        ctx.kept = part.shape[0]
        return _put(x, part, rows, inside)

    @staticmethod
    def backward(ctx, dy):
        return dy, _picked(dy, *ctx.saved_tensors, ctx.kept), None, None        # `_Pick` writes over those rows of dy


def _picked(x: torch.Tensor, rows: torch.Tensor, inside: torch.Tensor | None, kept: int) -> torch.Tensor:
    """[kept, b, h], 0 where a token is not in x."""
    flat = x.flatten(0, 1)
    if inside is None:
        return flat.index_select(0, rows).view(kept, *x.shape[1:])
    part = flat.index_select(0, rows.clamp(max=len(flat) - 1)).mul_(inside[:, None])
    return part.view(kept, *x.shape[1:])


def _put(x: torch.Tensor, part: torch.Tensor, rows: torch.Tensor, inside: torch.Tensor | None) -> torch.Tensor:
    """x with those rows of `part` in their places that are inside."""
    flat, part = x.flatten(0, 1), part.flatten(0, 1)
    if inside is None:
        return flat.clone().index_copy_(0, rows, part).view(x.shape)
    source = rows.new_full((len(flat) + 1,), -1)                                # which row of `part` comes to a row of x
    source[rows] = torch.arange(len(rows), device=rows.device)
    source = source[:-1, None]
    return part.index_select(0, source[:, 0].clamp(min=0)).where(source >= 0, flat).view(x.shape)
