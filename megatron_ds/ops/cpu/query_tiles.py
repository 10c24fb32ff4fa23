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
costs 1.4 times as much with 16 rows as with 256, the same from 32 on. Pure values, without tensors.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ..attention_pattern import AttentionPattern
from ..block_layout import BlockLayout

OVERHEAD = 8                     # rows
MOST_ROWS = 256


@dataclass(frozen=True)
class Edge:
    """Columns of a tile in which the pattern hides keys from some of the queries, by position.

    columns  of the tile, whose keys are consecutive positions
    offset   from the first query to the first of these keys
    """

    columns: slice
    offset: int


@dataclass(frozen=True, eq=False)
class QueryTile:
    """rows   positions of the queries
    keys   positions of the keys: a range, or an int64 array that is made of blocks
    blocks  numbers of those blocks; None for a range
    edges  columns in which queries see some of the keys
    seen   bool [blocks of rows, blocks of keys], False where the layout hides a block and no edge does;
           None: no such block
    """

    rows: range
    keys: range | np.ndarray
    blocks: np.ndarray | None = None
    edges: tuple[Edge, ...] = ()
    seen: np.ndarray | None = None


@lru_cache(maxsize=1024)
def tiles_of(pattern: AttentionPattern, positions: int) -> tuple[QueryTile, ...]:
    """The tiles of a sequence. A layout is the same for all heads, of blocks that divide the positions."""
    if pattern.layout is None:
        return tuple(_window_tiles(pattern, positions))
    return tuple(_layout_tiles(pattern, pattern.layout, positions))


def _window_tiles(pattern: AttentionPattern, positions: int) -> Iterator[QueryTile]:
    sides = [side for side in (pattern.left, pattern.after) if side is not None]
    widest = positions if None in (pattern.left, pattern.after) else min(positions, sum(sides) + 1)
    rows = min(MOST_ROWS, max(32, 16 * round(math.sqrt(OVERHEAD * widest) / 16)))
    whole = range(positions)
    for start in whole[::rows]:
        queries = whole[start:start + rows]
        keys = pattern.keys_of(queries, whole)
        yield QueryTile(queries, keys, edges=tuple(_edges(pattern, queries, keys, 0)))


def _layout_tiles(pattern: AttentionPattern, layout: BlockLayout, positions: int) -> Iterator[QueryTile]:
    (seen,), block, whole = layout.up_to(positions), layout.block, range(positions)
    inside = np.zeros_like(seen)                    # blocks of which the pattern shows something
    for i in range(len(seen)):
        keys = pattern.keys_of(whole[i * block:(i + 1) * block], whole)
        inside[i, keys.start // block:-(-keys.stop // block)] = True
    closed, seen = ~seen & inside, seen & inside
    for first, stop in _groups(seen, block):
        blocks = np.flatnonzero(seen[first:stop].any(axis=0))
        rows, edges, column = whole[first * block:stop * block], [], 0
        for run in _runs(blocks):
            part = whole[run.start * block:run.stop * block]
            edges += _edges(pattern, rows, part, column)
            column += len(part)
        keys, numbers = (blocks[:, None] * block + np.arange(block)).reshape(-1), blocks
        if len(blocks) and len(blocks) == blocks[-1] - blocks[0] + 1:
            keys, numbers = whole[blocks[0] * block:(blocks[-1] + 1) * block], None
        part = ~closed[first:stop][:, blocks]
        yield QueryTile(rows, keys, numbers, tuple(edges), None if part.all() else part)


def _edges(pattern: AttentionPattern, rows: range, keys: range, column: int) -> Iterator[Edge]:
    """The edges within a run of keys that begins at this column of the tile."""
    if pattern.after is not None and keys.stop > rows.start + pattern.after + 1:
        first = max(keys.start, rows.start + pattern.after + 1)
        yield Edge(slice(column + first - keys.start, column + len(keys)), first - rows.start)
    if pattern.left is not None and keys.start < rows.stop - 1 - pattern.left:
        stop = min(keys.stop, rows.stop - 1 - pattern.left)
        yield Edge(slice(column, column + stop - keys.start), keys.start - rows.start)


def _groups(seen: np.ndarray, block: int) -> list[tuple[int, int]]:
    """Runs [first, stop) of blocks of queries that share a tile: those that cost least together."""
    most, count = max(1, MOST_ROWS // block), len(seen)
    best = np.zeros(count + 1)                      # of the blocks before
    before = np.zeros(count + 1, dtype=np.int64)
    costs = np.full((count, most), np.inf)          # of a tile that ends with block i and has j + 1 blocks
    union = seen.copy()
    for j in range(most):
        if j:
            union[j:] |= seen[:-j]
        costs[j:, j] = union[j:].sum(axis=1) * ((j + 1) * block + OVERHEAD)
    for i in range(count):
        sizes = np.arange(1, min(most, i + 1) + 1)
        totals = best[i + 1 - sizes] + costs[i, sizes - 1]
        size = int(totals.argmin())
        best[i + 1], before[i + 1] = totals[size], i - size
    groups, stop = [], count
    while stop:
        groups.append((int(before[stop]), stop))
        stop = groups[-1][0]
    return groups[::-1]


def _runs(numbers: np.ndarray) -> Iterator[range]:
    """Runs of consecutive numbers."""
    if len(numbers):
        for run in np.split(numbers, np.flatnonzero(np.diff(numbers) > 1) + 1):
            yield range(int(run[0]), int(run[-1]) + 1)
