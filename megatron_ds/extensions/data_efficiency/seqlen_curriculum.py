"""Batches of shorter sequences, for a curriculum over sequence lengths.

    truncate    a b c d e f g h    length 3     a b c          the rest is not used
    fold                                        a b c
                                                d e f          s // length rows; the rest is not used

Labels are still the next tokens, so the last label of a row is the token after it. Rows of one sample are
separate sequences: they do not attend to each other, and the positions of each row count from 0.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ...batch.batch import Batch
from ...batch.documents import cut_boundaries
from .curricula import LengthCurriculum

# The later rows of a sample have larger ids, so that their dropout differs.
MOST_SAMPLES = 1 << 40


def shortened(lengths: LengthCurriculum, batch: Batch, length: int) -> Batch:
    """Return the batch with sequences of this length."""
    return (fold if lengths.folds else truncate)(batch, length)


def truncate(batch: Batch, length: int) -> Batch:
    """Return the first `length` positions of each sample; the batch itself if it is no longer."""
    if length >= batch.seq_length:
        return batch
    first = lambda rows: rows[:, :length]
    corner = lambda mask: mask[..., :length, :length]
    return _cut(batch, length, 1, first, corner)


def fold(batch: Batch, length: int) -> Batch:
    """Rows of `length` positions, those of one sample in order; the batch itself if it is no longer."""
    if length >= batch.seq_length:
        return batch
    count = batch.seq_length // length

    def rows(t: torch.Tensor) -> torch.Tensor:
        return t[:, : count * length].reshape(-1, length)

    def diagonal(mask: torch.Tensor) -> torch.Tensor:
        blocks = [
            mask[..., i : i + length, i : i + length]
            for i in range(0, count * length, length)
        ]
        return torch.stack(blocks, 1).flatten(0, 1)

    # Each piece is a sample of its own, with its own dropout.
    pieces = [piece * MOST_SAMPLES for piece in range(count)]
    ids = tuple(i + piece for i in batch.sample_ids for piece in pieces)
    folded = replace(
        _cut(batch, length, count, rows, diagonal),
        sample_ids=ids,
        rows_per_sample=batch.rows_per_sample * count,
    )
    return replace(folded, position_ids=_from_zero(folded.position_ids))


def _cut(
    batch: Batch, length: int, count: int, rows: Callable, mask: Callable
) -> Batch:
    """Return the batch with shorter fields.

    rows  makes `count` rows of each row of a field [b, s]
    mask  does the same with a field [b, 1, s, s]
    """
    cut: dict[str, Any] = {}
    if batch.boundaries is not None:
        cut["boundaries"] = cut_boundaries(batch.boundaries, length, count)
    for name, value in batch.tensors().items():
        if value.dim() == 2:
            # A row that is expanded over all samples stays expanded.
            alike = value.stride(0) == 0
            cut[name] = rows(value) if alike else rows(value).contiguous()
        elif value.dim() == 4:
            cut[name] = mask(value).contiguous()
    return replace(batch, **cut)


def _from_zero(positions: torch.Tensor) -> torch.Tensor:
    """Positions [b, c] of rows cut from longer ones, from the start of the row or document."""
    counted = torch.arange(positions.shape[1], device=positions.device)
    # Up to the first document that begins inside the row.
    within = positions - positions[:, :1] == counted
    within = within.long().cumprod(1).bool()
    started = torch.where(within, counted, positions)
    if bool((started == counted).all()):
        return counted.expand_as(started)
    return started
