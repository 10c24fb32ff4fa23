"""`visible_blocks`: which blocks of scores some query of theirs sees, and which need no mask. All planners of
attention ask it, each with blocks of its own size.

    compiled kernel of CPUs   16 × 16 scores, the units of its registers     extensions/kernels/cpu/key_spans.py
    FlexAttention             tiles of 128 × 128                             extensions/kernels/gpu/flex_attention.py
    context parallelism       up to 512 × 1024, and whole documents          attention_tiles.py

    blocks of 32 tokens, fixed, causal (4 local, 1 global); four of them are a tile of tokens

    1 . . . | . . . .           partial  .                the first tile of the second row has the fourth
    1 1 . . | . . . .                                     block of keys only: it is computed, with a mask
    1 1 1 . | . . . .
    1 1 1 1 | . . . .
    --------+--------
    . . . 1 | 1 . . .           partial  partial
    . . . 1 | 1 1 . .
    . . . 1 | 1 1 1 .
    . . . 1 | 1 1 1 1

Blocks of a pattern are computed on the host, from the ends of the blocks, without a number for each score.
Those of documents take the numbers of the first and the last document of each block: on the host where
boundaries are known, on a device where only it has them.
"""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
import torch.nn.functional as F

from .attention_pattern import AttentionPattern

Boundaries = tuple[tuple[int, ...], ...]  # of each sample, where documents begin


class Parts(NamedTuple):
    """Runs of neighbouring positions: the first position of each, and the one past its last."""

    starts: np.ndarray
    stops: np.ndarray

    @classmethod
    def of(cls, run: range, size: int) -> "Parts":
        """Return a run in parts of `size` positions; the last may have fewer."""
        starts = np.arange(run.start, run.stop, size)
        return cls(starts, np.minimum(starts + size, run.stop))

    def documents(self, boundaries: Boundaries) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers of the first and of the last document in each part, [samples, parts]."""
        ends = (self.starts, self.stops - 1)
        first, last = (
            np.array([np.searchsorted(sample, at, "right") for sample in boundaries])
            for at in ends
        )
        return first, last


# Arrays on the host, tensors on a device.
A = TypeVar("A", np.ndarray, torch.Tensor)


@dataclass(frozen=True, eq=False)
class VisibleBlocks(Generic[A]):
    """The blocks of queries (row) and keys (column), bool [b or 1, n or 1, rows, columns] or without samples:

    seen   whether one of the queries sees one of the keys; else the block is not computed
    whole  whether each of the queries sees each of the keys; else it needs a mask
    """

    seen: A
    whole: A

    def __and__(self, other: "VisibleBlocks[A]") -> "VisibleBlocks[A]":
        """Return the blocks of queries that see what both let them see.

        A block where no query sees a key through both may still be computed, with a mask.
        """
        seen = self.seen & other.seen
        whole = self.whole & other.whole
        return VisibleBlocks(seen, whole)


def visible_blocks(
    pattern: AttentionPattern,
    queries: Parts,
    keys: Parts,
    boundaries: Boundaries | None = None,
) -> VisibleBlocks[np.ndarray]:
    """Arrays [n or 1, rows, columns] of a pattern, and of documents whose boundaries are given: what any sample
    sees, and what is whole in all. Raises LayoutError for positions that a layout does not have."""
    shape = (1, len(queries.starts), len(keys.starts))
    seen = np.ones(shape, dtype=bool)
    whole = np.ones(shape, dtype=bool)
    # of key less query; a block has all distances between
    least = keys.starts - (queries.stops[:, None] - 1)
    most = (keys.stops - 1) - queries.starts[:, None]
    if pattern.after is not None:
        seen &= least <= pattern.after
        whole &= most <= pattern.after
    if pattern.left is not None:
        seen &= most >= -pattern.left
        whole &= least >= -pattern.left
    found = VisibleBlocks(seen, whole)
    if pattern.layout is not None:
        count, blocks = pattern.layout.counts(queries, keys)
        found &= VisibleBlocks(count > 0, count == blocks)
    if boundaries is not None:
        ends = queries.documents(boundaries), keys.documents(boundaries)
        apart = of_documents(*ends)
        found &= VisibleBlocks(np.any(apart.seen, 0), np.all(apart.whole, 0))
    return found


def keys_seen(
    pattern: AttentionPattern,
    boundaries: Boundaries | None,
    queries: range,
    keys: range,
) -> range:
    """Return the part of `keys` from the first to the last that any of the queries may see in any sample; maybe
    empty.

    Both are contiguous positions; `queries` has at least one. A layout hides nothing here.
    """
    seen = pattern.keys_of(queries, keys)
    if not boundaries or not len(seen):
        return seen
    # The documents of the first and of the last query end what each sample shows.
    runs = []
    for sample in boundaries:
        before = bisect_right(sample, queries.start)
        after = bisect_left(sample, queries.stop)
        first = max(seen.start, sample[before - 1] if before > 0 else 0)
        last = min(seen.stop, sample[after] if after < len(sample) else seen.stop)
        if first < last:
            runs.append((first, last))
    if not runs:
        return range(0)
    return range(min(run[0] for run in runs), max(run[1] for run in runs))


def of_documents(queries: tuple[A, A], keys: tuple[A, A]) -> VisibleBlocks[A]:
    """Blocks [b, rows, columns] of documents kept apart.

    queries, keys: (first, last) number of a document in each of their parts, arrays or tensors [b, parts]
    """
    first_of_queries, last_of_queries = (t[:, :, None] for t in queries)
    first_of_keys, last_of_keys = (t[:, None] for t in keys)
    seen = (first_of_queries <= last_of_keys) & (first_of_keys <= last_of_queries)
    whole = (first_of_queries == last_of_keys) & (first_of_keys == last_of_queries)
    return VisibleBlocks(seen, whole)


def of_ids(ids: torch.Tensor, size: int) -> VisibleBlocks[torch.Tensor]:
    """Tensors [b, 1, blocks, blocks] of documents kept apart. ids: int64 [b, s], not decreasing in a sample"""
    more = -ids.shape[1] % size
    parts = torch.cat((ids, ids[:, -1:].expand(-1, more)), dim=1).unflatten(
        1, (-1, size)
    )
    ends = (parts[..., 0], parts[..., -1])
    blocks = of_documents(ends, ends)
    return VisibleBlocks(blocks.seen[:, None], blocks.whole[:, None])


def of_padding(hidden: torch.Tensor, size: int) -> VisibleBlocks[torch.Tensor]:
    """Tensors [b, 1, 1, blocks]. hidden: bool [b, s], keys that no query sees"""
    padded = F.pad(hidden, (0, -hidden.shape[1] % size), value=True)
    keys = padded.unflatten(1, (-1, size))
    return VisibleBlocks(~keys.all(2)[:, None, None], ~keys.any(2)[:, None, None])
