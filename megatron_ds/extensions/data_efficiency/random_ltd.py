"""Random layer-wise token dropping (Yao et al. 2022, arXiv:2211.11586): a block sees some of the tokens.

    x [s, b, h] ──┬── k tokens of each sample, in their order ── block ── [k, b, h] ──┐
                  └── all ───────────────────────────────────────── written over ─────┴── [s, b, h]

The other tokens pass by unchanged. Each block selects tokens of each sample by (seed, name of the block,
sample) alone, so tensor-parallel ranks, pipeline stages, a recomputed forward and a resumed run agree without
communication. The block is any layer: it receives hidden states of k tokens, and a batch with their
positions, which rotary embeddings, attention masks and dropout use.

Note: how tokens travel where ranks share a sequence, by sequence or context parallelism. A rank holds s/r
positions and any number of the kept tokens, while the block needs k/r tokens on each rank, as if the sequence
had k tokens. Each rank writes its kept tokens into k rows of zeros, in the order of the sequence. A
reduce-scatter of these gives each rank its k/r of them, exactly, because one rank alone adds something to a
row. After the block an all-gather returns all k rows, and each rank takes those of its own positions.
Backward is the same two, exchanged.

Letters: s positions, b samples, k kept tokens of each sample, r ranks that share a sequence, h channels.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from ...batch.batch import Batch
from ...config import RunConfig
from ...errors import LayoutError
from ...models.layer import Layer
from ...mpu.context import ParallelContext
from ...mpu.regions import (
    gather_from_sequence_region,
    reduce_scatter_to_sequence_region,
)
from ...ops.keyed_random import random_subset


def dropping_layers(
    layers: list[Layer], config: RunConfig, ctx: ParallelContext
) -> list[Layer]:
    """Return the layers of a run, in which the blocks of --random-ltd drop tokens."""
    kept = config.kept_tokens
    return layers if kept is None else with_random_ltd(layers, kept.blocks, ctx)


def with_random_ltd(
    layers: Sequence[Layer], blocks: Collection[int], ctx: ParallelContext
) -> list[Layer]:
    """Return the layers, in which the blocks with these numbers drop tokens."""
    numbers = {
        layer.name: i
        for i, layer in enumerate(layer for layer in layers if layer.is_block)
    }
    return [
        replace(layer, make=partial(_wrap, layer, ctx), drops_tokens=True)
        if numbers.get(layer.name) in blocks
        else layer
        for layer in layers
    ]


def _wrap(layer: Layer, ctx: ParallelContext) -> nn.Module:
    return RandomLTD(layer.make(), layer.name, ctx)


class RandomLTD(nn.Module):
    """x [s(/r), b, h] → the same shape.

    In evaluation, and if `batch.kept_tokens` is None, the block sees all tokens.
    """

    def __init__(self, block: nn.Module, name: str, ctx: ParallelContext):
        super().__init__()
        self.block = block
        self.name = name
        self.ctx = ctx

    def set_recompute(self, granularity: str | None) -> None:
        """Set what the block recomputes in backward: `granularity` of `Block.set_recompute`."""
        self.block.set_recompute(granularity)  # type: ignore[operator]  # torch: attributes of modules are tensors

    def forward(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Apply the block to the kept tokens. Collective where ranks share a sequence; see the note above."""
        kept = batch.kept_tokens
        if kept is None or kept >= batch.whole_length or not batch.training:
            return self.block(x, batch)
        index = self.draw(kept, batch)  # [b, k]
        rows, inside = self.rows(index, x, batch)
        x, part = _Pick.apply(x, rows, inside, kept)  # part [k, b, h]
        part = self.shared(part)  # [k/r, b, h]
        part = self.joined(self.block(part, batch.keep(index, self.ctx.slice)))
        return _Put.apply(x, part, rows, inside)

    def shared(self, part: torch.Tensor) -> torch.Tensor:
        """[k, b, h], each row on one rank and 0 on the others → this rank's rows [k/r, b, h]."""
        ranks = self.ctx.sequence_ranks
        if ranks is None:
            return part
        order = self.ctx.slice.order(len(part), part.device)
        if order is not None:
            part = part.index_select(0, order)
        return reduce_scatter_to_sequence_region(
            reduce_scatter_to_sequence_region(part, ranks.cp), ranks.tp
        )

    def joined(self, part: torch.Tensor) -> torch.Tensor:
        """[k/r, b, h] → all rows [k, b, h], in the order of the sequence."""
        ranks = self.ctx.sequence_ranks
        if ranks is None:
            return part
        part = gather_from_sequence_region(
            gather_from_sequence_region(part, ranks.tp), ranks.cp
        )
        order = self.ctx.slice.order(len(part), part.device)
        return part if order is None else part.index_select(0, order.argsort())

    def draw(self, kept: int, batch: Batch) -> torch.Tensor:
        """Return which tokens of each sample, of the whole sequence: int64 [b, k], ascending."""
        if kept % (parts := self.ctx.slice.parts):
            raise LayoutError(
                f"{self.name}: {kept} kept tokens are not divisible by {parts}, in which the "
                "ranks that share a sequence divide it. Keep a multiple of it."
            )
        keys = [
            (self.ctx.seed, "random_ltd", self.name, int(sample))
            for sample in batch.sample_ids
        ]
        return random_subset(keys, kept, batch.whole_length, batch.tokens.device)

    def rows(
        self, index: torch.Tensor, x: torch.Tensor, batch: Batch
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(rows, inside) of the kept tokens, in the order of [k, b].

        rows    of x as [s(/r) b, h]; for tokens that other ranks hold, one beyond the last
        inside  whether this rank holds the token; None when it holds all
        """
        held, samples = x.shape[:2]
        column = torch.arange(samples, device=index.device)
        part = self.ctx.slice
        if part.tensor.size * part.context.size == 1:
            return (index.t() * samples + column).flatten(), None
        positions = part.index(batch.whole_length, index.device)
        rows = part.rows(batch.seq_length)
        if positions is None:
            here = index.t() - rows.start
            inside = (here >= 0) & (here < held)
        else:
            positions = positions[rows.start : rows.stop].contiguous()
            here = torch.searchsorted(positions, index.t().contiguous()).clamp(
                max=held - 1
            )
            inside = positions[here] == index.t()
        return (here * samples + column).where(
            inside, held * samples
        ).flatten(), inside.flatten()


class _Pick(torch.autograd.Function):
    # The whole x goes through, to `_Put`, so that backward writes one gradient into the other instead of
    # adding two.

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
        # dy goes on unchanged: the backward of `_Pick` overwrites the rows of the kept tokens.
        return dy, _picked(dy, *ctx.saved_tensors, ctx.kept), None, None


def _picked(
    x: torch.Tensor, rows: torch.Tensor, inside: torch.Tensor | None, kept: int
) -> torch.Tensor:
    """[kept, b, h], 0 where a token is not in x."""
    flat = x.flatten(0, 1)
    if inside is None:
        return flat.index_select(0, rows).view(kept, *x.shape[1:])
    part = flat.index_select(0, rows.clamp(max=len(flat) - 1)).mul_(inside[:, None])
    return part.view(kept, *x.shape[1:])


def _put(
    x: torch.Tensor, part: torch.Tensor, rows: torch.Tensor, inside: torch.Tensor | None
) -> torch.Tensor:
    """x, with the rows of the kept tokens that it holds replaced by those of `part`."""
    flat = x.flatten(0, 1)
    part = part.flatten(0, 1)
    if inside is None:
        return flat.clone().index_copy_(0, rows, part).view(x.shape)
    source = rows.new_full((len(flat) + 1,), -1)  # the row of `part` for each row of x
    source[rows] = torch.arange(len(rows), device=rows.device)
    source = source[:-1, None]
    return (
        part.index_select(0, source[:, 0].clamp(min=0))
        .where(source >= 0, flat)
        .view(x.shape)
    )
