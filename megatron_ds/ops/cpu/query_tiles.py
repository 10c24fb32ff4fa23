"""Tiles of attention on CPU: some queries that are worked on at once, and the keys that they see.

    window of 3 blocks          keys: a range                 fixed layout           keys: numbers of blocks

    x                                                         x
    x x                         tile 0: keys 0-2              x x                    tile 0: blocks 0 1 2 3
    x x x                                                     x x x
      x x x                     tile 1: keys 1-5              x x x x
        x x x                                                       x x              tile 1: blocks 3 4 5 ..
          x x x                                                     x x x

Neighbouring blocks of queries share a tile where the scores that only some of them need cost less than to
read the common keys again. A product of few rows is slower per row, and keys are gathered for each tile: what
a tile costs is taken as keys * (rows + `OVERHEAD`). Measured on one core of an AMD EPYC, a row of a product
costs 1.4 times as much with 16 rows as with 256, the same from 32 on. Small tiles are stacked, so that few
operations work on many of them. Pure values, without tensors.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ..attention_pattern import AttentionPattern

OVERHEAD = 16  # rows
MOST_ROWS = 256
PADDING = 1.06  # the most keys of tiles that are worked on together, over the least


@dataclass(frozen=True)
class Edge:
    """Columns of a tile in which the pattern hides keys from some of the queries, by position.

    columns  of the tile, whose keys are consecutive positions
    offset   from the first query to the first of these keys
    """

    columns: slice
    offset: int


@dataclass(frozen=True)
class RangeTile:
    """Consecutive positions of queries and of keys.

    edges  columns in which queries see some of the keys
    """

    rows: range
    keys: range
    edges: tuple[Edge, ...] = ()

    @property
    def scores(self) -> int:
        """Number of scores computed for one head."""
        return len(self.rows) * len(self.keys)


@dataclass(frozen=True, eq=False)
class BlockTiles:
    """Several tiles of equal shape, whose keys are gathered: t tiles of m blocks of queries and k of keys.

    rows   int64 [t, m], numbers of consecutive blocks
    keys   int64 [t, k], numbers of blocks
    seen   bool [t, m, k], which of them are computed in vain, being False
    block  positions of a block
    whole  keys of each tile, the first ones, of which all of its queries see all positions
    """

    rows: np.ndarray
    keys: np.ndarray
    seen: np.ndarray
    block: int
    whole: int

    @property
    def scores(self) -> int:
        """Number of scores computed for one head."""
        return self.seen.size * self.block**2


@lru_cache(maxsize=1024)
def range_tiles(pattern: AttentionPattern, positions: int) -> tuple[RangeTile, ...]:
    """The tiles of a sequence, for a pattern without layout."""
    return tuple(_window_tiles(pattern, positions))


@lru_cache(maxsize=1024)
def block_tiles(
    pattern: AttentionPattern, positions: int, most: int
) -> tuple[BlockTiles, ...]:
    """The tiles of a layout that is the same for all heads, of blocks that divide the positions.

    pattern: hides nothing more than later keys. most: scores of tiles that are worked on at once
    """
    (seen,), block = pattern.layout.up_to(positions), pattern.layout.block
    seen = np.tril(seen) if pattern.causal else seen
    together = min((1, 2, 4, 8, 16), key=lambda count: _cost(seen, block, count))
    found = []
    for first in range(0, len(seen), together):
        part = seen[first : first + together]
        found.append(
            (first, *_whole_first(part, first if pattern.causal else len(seen)), part)
        )
    found.sort(
        key=lambda tile: (len(tile[-1]), len(tile[1]))
    )  # alike next to each other
    return tuple(_stacked(tiles, block) for tiles in _batches(found, block, most))


def _whole_first(part: np.ndarray, edge: int) -> tuple[np.ndarray, int]:
    """(numbers of the blocks that a tile [m, blocks] sees, how many of these, the first ones, all of its
    queries see). edge: the first block of which queries see only some positions."""
    whole = part.all(axis=0)
    whole[edge : edge + len(part)] = False
    partly = np.flatnonzero(part.any(axis=0) & ~whole)
    return np.concatenate((np.flatnonzero(whole), partly)), int(whole.sum())


def _cost(seen: np.ndarray, block: int, together: int) -> float:
    """Cost of tiles of `together` blocks of queries, in keys times rows; infinite above `MOST_ROWS` rows."""
    if together > max(1, MOST_ROWS // block) or together > len(seen):
        return math.inf
    keys = np.logical_or.reduceat(seen, np.arange(0, len(seen), together)).sum()
    return float(keys) * (together * block + OVERHEAD)


def _batches(found: list, block: int, most: int) -> Iterator[list]:
    """Runs of tiles with equal numbers of rows and nearly equal numbers of keys."""
    batch: list = []
    for tile in found:
        _, keys, _, part = tile
        if batch:
            same = len(part) == len(batch[0][-1]) and len(keys) <= PADDING * len(
                batch[0][1]
            )
            scores = (len(batch) + 1) * len(part) * max(1, len(keys)) * block**2
            if not same or scores > most:
                yield batch
                batch = []
        batch.append(tile)
    yield batch


def _stacked(tiles: list, block: int) -> BlockTiles:
    """Tiles as one value; missing keys are block 0, which no query of the tile sees."""
    width = max(1, max(len(keys) for _, keys, *_ in tiles))
    together = len(tiles[0][-1])
    blocks = np.zeros((len(tiles), width), dtype=np.int64)
    seen = np.zeros((len(tiles), together, width), dtype=bool)
    for i, (_, keys, _, part) in enumerate(tiles):
        blocks[i, : len(keys)] = keys
        seen[i, :, : len(keys)] = part[:, keys]
    rows = np.array([first for first, *_ in tiles])[:, None] + np.arange(together)
    return BlockTiles(rows, blocks, seen, block, min(whole for _, _, whole, _ in tiles))


def _window_tiles(pattern: AttentionPattern, positions: int) -> Iterator[RangeTile]:
    sides = [side for side in (pattern.left, pattern.after) if side is not None]
    widest = (
        positions
        if None in (pattern.left, pattern.after)
        else min(positions, sum(sides) + 1)
    )
    rows = min(MOST_ROWS, max(32, 16 * round(math.sqrt(OVERHEAD * widest) / 16)))
    whole = range(positions)
    for start in whole[::rows]:
        queries = whole[start : start + rows]
        keys = pattern.keys_of(queries, whole)
        yield RangeTile(queries, keys, edges=tuple(_edges(pattern, queries, keys, 0)))


def _edges(
    pattern: AttentionPattern, rows: range, keys: range, column: int
) -> Iterator[Edge]:
    """The edges within a run of keys that begins at this column of the tile."""
    if pattern.after is not None and keys.stop > rows.start + pattern.after + 1:
        first = max(keys.start, rows.start + pattern.after + 1)
        yield Edge(
            slice(column + first - keys.start, column + len(keys)), first - rows.start
        )
    if pattern.left is not None and keys.start < rows.stop - 1 - pattern.left:
        stop = min(keys.stop, rows.stop - 1 - pattern.left)
        yield Edge(slice(column, column + stop - keys.start), keys.start - rows.start)
