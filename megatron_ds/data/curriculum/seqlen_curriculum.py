"""Batches of shorter sequences, for a curriculum over lengths. Each takes the first `length` positions of samples of s.

    truncate    a b c d e f g h    length 3     a b c                                the rest is not trained on
    fold                                        a b c
                                                d e f                                s // length rows; what is left over is not

Labels are the next tokens all the same, so a row's last label is the token after it. Rows of one sample are sequences of their
own: they do not see one another, and each counts its positions from 0.
"""

from collections.abc import Callable
from dataclasses import fields, replace

import torch

from ..batch import Batch

MOST_SAMPLES = 1 << 40          # rows after a sample's first have ids above any sample's, so that their dropout is their own


def truncate(batch: Batch, length: int) -> Batch:
    """The first `length` positions of each sample; the batch itself where it is no longer."""
    return batch if length >= batch.seq_length else _cut(batch, lambda t: t[:, :length], lambda m: m[..., :length, :length])


def fold(batch: Batch, length: int) -> Batch:
    """Rows of `length` positions, those of one sample one after the other; the batch itself where it is no longer."""
    if length >= batch.seq_length:
        return batch
    count = batch.seq_length // length

    def rows(t: torch.Tensor) -> torch.Tensor:
        return t[:, :count * length].reshape(-1, length)

    def diagonal(mask: torch.Tensor) -> torch.Tensor:
        blocks = [mask[..., i:i + length, i:i + length] for i in range(0, count * length, length)]
        return torch.stack(blocks, 1).flatten(0, 1)

    ids = tuple(i + piece * MOST_SAMPLES for i in batch.sample_ids for piece in range(count))
    folded = replace(_cut(batch, rows, diagonal), sample_ids=ids, rows_per_sample=batch.rows_per_sample * count)
    return replace(folded, position_ids=_from_zero(folded.position_ids))


def _cut(batch: Batch, rows: Callable, mask: Callable) -> Batch:
    """`rows` of every field [b, s], `mask` of every [b, 1, s, s]; others stay."""
    cut = {}
    for field in fields(batch):
        value = getattr(batch, field.name)
        if isinstance(value, torch.Tensor) and value.dim() == 2:
            alike = value.stride(0) == 0                   # one row that stands for all stays one row
            cut[field.name] = rows(value) if alike else rows(value).contiguous()
        elif isinstance(value, torch.Tensor) and value.dim() == 4:
            cut[field.name] = mask(value).contiguous()
    return replace(batch, **cut)


def _from_zero(positions: torch.Tensor) -> torch.Tensor:
    """Positions [b, c] of rows cut out of longer ones, counted from the row's start, or the document's if that is in it."""
    counted = torch.arange(positions.shape[1], device=positions.device)
    within = positions - positions[:, :1] == counted        # up to the first document that begins inside the row
    within = within.long().cumprod(1).bool()
    started = torch.where(within, counted, positions)
    return counted.expand_as(started) if bool((started == counted).all()) else started
