"""Tiles of attention on CPU: some queries that are worked on at once, and the keys that they see.

    window of 3 blocks          keys: a range                 fixed layout           keys: numbers of blocks

    x                                                         x
    x x                         tile 0: keys 0-2              x x                    tile 0: blocks 0 1 2 3
    x x x                                                     x x x
      x x x                     tile 1: keys 1-5              x x x x
        x x x                                                       x x              tile 1: blocks 3 4 5 ..
          x x x                                                     x x x

Neighbouring blocks of queries share a tile where the keys that only some of them see cost less than to
multiply, or to gather, the common ones again. A product of few rows is as slow as one of more rows: what a
tile costs is taken as keys * (rows + `OVERHEAD`). Pure values, without tensors.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ..attention_pattern import AttentionPattern
from ..block_layout import BlockLayout

OVERHEAD = 32                    # rows
MOST_ROWS = 256


@dataclass(frozen=True, eq=False)
class QueryTile:
    """rows  positions of the queries
    keys  positions of the keys: a range, or an int64 array that is made of blocks
    blocks  numbers of those blocks; None for a range
    seen  bool [blocks of rows, blocks of keys] of a layout; None: all
    """

    rows: range
    keys: range | np.ndarray
    blocks: np.ndarray | None = None
    seen: np.ndarray | None = None

    def hidden(self, pattern: AttentionPattern, block: int, columns: slice) -> np.ndarray:
        """bool [rows, columns], True where a query does not see a key. columns: of the keys of the tile"""
        keys = np.asarray(self.keys[columns])
        queries = np.arange(self.rows.start, self.rows.stop)[:, None]
        hidden = np.zeros((len(self.rows), len(keys)), dtype=bool)
        if pattern.after is not None:
            hidden |= keys > queries + pattern.after
        if pattern.left is not None:
            hidden |= keys < queries - pattern.left
        if self.seen is not None:
            which = np.arange(len(self.keys))[columns] // block
            hidden |= ~self.seen[(queries[:, 0] - self.rows.start) // block][:, which]
        return hidden

    def partly_hidden(self, pattern: AttentionPattern, block: int) -> Sequence[slice]:
        """The columns in which a query does not see a key, as few slices."""
        width = block if self.seen is not None else max(16, len(self.rows) // 4)
        count = -(-len(self.keys) // width)
        partly = np.zeros(count, dtype=bool)
        first, last = self.rows.start, self.rows.stop - 1
        starts = np.asarray(self.keys[::width])
        stops = np.minimum(starts + width, self.keys[-1] + 1)
        if pattern.after is not None:
            partly |= stops - 1 > first + pattern.after
        if pattern.left is not None:
            partly |= starts < last - pattern.left
        if self.seen is not None:
            partly |= ~self.seen.all(axis=0)
        return [slice(run.start * width, min(run.stop * width, len(self.keys)))
                for run in _few(list(_runs(np.flatnonzero(partly))))]


@lru_cache(maxsize=1024)
def tiles_of(pattern: AttentionPattern, positions: int) -> tuple[QueryTile, ...]:
    """The tiles of a sequence. A layout is the same for all heads, of blocks that divide the positions."""
    if pattern.layout is None:
        return tuple(_window_tiles(pattern, positions))
    return tuple(_layout_tiles(pattern, pattern.layout, positions))


def _window_tiles(pattern: AttentionPattern, positions: int) -> Iterator[QueryTile]:
    sides = [side for side in (pattern.left, pattern.after) if side is not None]
    widest = positions if None in (pattern.left, pattern.after) else min(positions, sum(sides) + 1)
    rows = min(MOST_ROWS, max(32, 32 * round(math.sqrt(OVERHEAD * widest) / 32)))
    whole = range(positions)
    for start in whole[::rows]:
        queries = whole[start:start + rows]
        yield QueryTile(queries, pattern.keys_of(queries, whole))


def _layout_tiles(pattern: AttentionPattern, layout: BlockLayout, positions: int) -> Iterator[QueryTile]:
    (seen,), block, whole = layout.up_to(positions), layout.block, range(positions)
    seen = seen.copy()
    for i in range(len(seen)):                      # blocks that the pattern hides
        keys = pattern.keys_of(whole[i * block:(i + 1) * block], whole)
        seen[i, :keys.start // block] = False
        seen[i, -(-keys.stop // block):] = False
    for first, stop in _groups(seen, block):
        blocks = np.flatnonzero(seen[first:stop].any(axis=0))
        rows = whole[first * block:stop * block]
        if len(blocks) and len(blocks) == blocks[-1] - blocks[0] + 1:
            keys, numbers = whole[blocks[0] * block:(blocks[-1] + 1) * block], None
        else:
            keys, numbers = (blocks[:, None] * block + np.arange(block)).reshape(-1), blocks
        yield QueryTile(rows, keys, numbers, seen[first:stop][:, blocks])


def _groups(seen: np.ndarray, block: int) -> Iterator[tuple[int, int]]:
    """Runs [first, stop) of blocks of queries that share a tile."""
    first, union = 0, seen[0]
    for i in range(1, len(seen)):
        joined, rows = union | seen[i], (i - first) * block
        apart = union.sum() * (rows + OVERHEAD) + seen[i].sum() * (block + OVERHEAD)
        if rows + block > MOST_ROWS or joined.sum() * (rows + block + OVERHEAD) > apart:
            yield first, i
            first, union = i, seen[i]
        else:
            union = joined
    yield first, len(seen)


def _runs(numbers: np.ndarray) -> Iterator[range]:
    """Runs of consecutive numbers."""
    if len(numbers):
        for run in np.split(numbers, np.flatnonzero(np.diff(numbers) > 1) + 1):
            yield range(int(run[0]), int(run[-1]) + 1)


def _few(runs: list[range], most: int = 4) -> list[range]:
    return runs if len(runs) <= most else [range(runs[0].start, runs[-1].stop)]
