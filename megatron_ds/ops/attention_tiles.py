"""Tiles of a matrix of attention scores: which parts of a block must be computed, and which need a mask.

Queries and keys of a block are runs of positions, such as the two chunks that a context-parallel rank holds.
`tiles` divides the block into tiles, of which hidden ones are left out, so a causal mask, a window or separate
documents save the work that they hide:

    queries | 0 1 2 3 | 12 13 14 15         keys 4 .. 11 of another rank, causal:
                                            0 .. 3    see nothing: no tile
                                            12 .. 15  see all of them: one tile without a mask

Only numbers of the host decide: document ids on a GPU are not read. Without boundaries of documents
(`batch.documents`), ids mask elements and save no work.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import numpy as np

from .attention_pattern import FULL, AttentionPattern
from .key_visibility import KeyVisibility
from .visible_blocks import (
    Boundaries,
    Parts,
    VisibleBlocks,
    keys_seen,
    visible_blocks,
)


@dataclass(frozen=True)
class TileLimits:
    """Most rows and columns of a tile whose elements may be hidden.

    rows_of_layout  of a tile of a block layout
    gap             keys between two tiles of a layout, of which no query sees any
    """

    rows: int = 512
    columns: int = 1024
    rows_of_layout: int = 128
    gap: int = 64


LIMITS = TileLimits()


@dataclass(frozen=True)
class Runs:
    """Contiguous positions that a tensor holds one after another."""

    ranges: tuple[range, ...]

    def __len__(self) -> int:
        return sum(map(len, self.ranges))

    def __iter__(self) -> Iterator[tuple[int, range]]:
        """(first row in the tensor, positions) of each run."""
        first = 0
        for positions in self.ranges:
            yield first, positions
            first += len(positions)


@dataclass(frozen=True)
class Tile:
    """Rows of the queries × columns of the keys that a block holds.

    queries, keys  their positions
    is_whole       every query sees every key, so no mask is needed
    is_triangle    nothing is hidden but later keys, of the same positions as the queries
    """

    rows: slice
    columns: slice
    queries: range
    keys: range
    is_whole: bool = False
    is_triangle: bool = False

    @classmethod
    def of(cls, queries: range, keys: range, **kind: bool) -> "Tile":
        """Return a tile of tensors that hold all positions."""
        rows, columns = (slice(run.start, run.stop) for run in (queries, keys))
        return cls(rows, columns, queries, keys, **kind)

    def placed(self, rows: int, columns: int) -> "Tile":
        """Return the tile in tensors whose rows and columns are so many later than positions."""
        return replace(
            self,
            rows=slice(self.rows.start + rows, self.rows.stop + rows),
            columns=slice(self.columns.start + columns, self.columns.stop + columns),
        )


def tiles(
    visible: KeyVisibility, queries: Runs, keys: Runs, has_bias: bool = False
) -> Iterator[Tile]:
    """Yield the tiles of a block, by rows, then by columns; each element is in one tile at most.

    has_bias: numbers are added to all scores, or drop out, so that no tile may be large
    """
    is_known = visible.is_known and not has_bias
    for first_row, rows in queries:
        for first_column, columns in keys:
            plan = _Plan(visible.pattern, visible.boundaries, is_known, LIMITS)
            for tile in _planned(plan, rows, columns):
                yield tile.placed(first_row - rows.start, first_column - columns.start)


def run_tiles(visible: KeyVisibility, queries: Runs, keys: Runs) -> Iterator[Tile]:
    """Each run of queries × each run of keys of which they see some, for a kernel that leaves out the others
    itself."""
    pattern = visible.pattern
    for first_row, rows in queries:
        for first_column, columns in keys:
            seen = keys_seen(pattern, visible.boundaries, rows, columns)
            if len(seen) and _one_block(pattern, rows, seen).seen.any():
                tile = Tile.of(rows, columns)
                yield tile.placed(first_row - rows.start, first_column - columns.start)


@dataclass(frozen=True)
class _Plan:
    """What decides the tiles of two runs of positions.

    is_known  pattern and boundaries are all that hides or needs numbers for elements
    """

    pattern: AttentionPattern
    boundaries: Boundaries | None
    is_known: bool
    limits: TileLimits

    def tiles(self, queries: range, keys: range) -> Iterator[Tile]:
        """Their tiles, with rows and columns that count from position 0."""
        if self.pattern.layout is not None:
            yield from self._grid(queries, keys)
            return
        for rows in self._sections(queries):
            seen = keys_seen(self.pattern, self.boundaries, rows, keys)
            for columns in _halves(seen, rows.start):
                if self._is_whole(self.pattern, rows, columns):
                    yield Tile.of(rows, columns, is_whole=True)
                elif self._is_triangle(rows, columns):
                    yield Tile.of(rows, columns, is_triangle=True)
                else:
                    yield from self._grid(rows, columns)

    def _sections(self, queries: range) -> Iterator[range]:
        """Parts of a run of queries: a document of at least `limits.rows` positions is one, as it may need no
        mask. So are all positions between two of these. Documents of several samples end wherever one of them
        does."""
        starts = {queries.start, queries.stop}
        for sample in self.boundaries or () if self.is_known else ():
            inside = (
                bisect_right(sample, queries.start),
                bisect_left(sample, queries.stop),
            )
            starts.update(sample[slice(*inside)])
        first = queries.start
        for start, stop in pairwise(sorted(starts)):
            if stop - start >= self.limits.rows:
                yield from filter(len, (range(first, start), range(start, stop)))
                first = stop
        yield from filter(len, (range(first, queries.stop),))

    def _is_whole(self, pattern: AttentionPattern, rows: range, columns: range) -> bool:
        found = _one_block(pattern, rows, columns, self.boundaries)
        return self.is_known and bool(found.whole.all())

    def _is_triangle(self, rows: range, columns: range) -> bool:
        """Return whether a kernel with a causal mask of its own computes them."""
        return (
            rows == columns
            and self.pattern.causal
            and self.pattern.is_plain
            and self._is_whole(FULL, rows, columns)
        )

    def _grid(self, queries: range, keys: range) -> Iterator[Tile]:
        """Tiles of limited rows and columns."""
        layout = self.pattern.layout
        size = self.limits.rows if layout is None else self.limits.rows_of_layout
        for rows in _pieces(queries, size):
            seen = keys_seen(self.pattern, self.boundaries, rows, keys)
            runs: Iterable[range] = [seen]
            if layout is not None:
                runs = layout.runs(rows, seen, self.limits.gap)
            for run in filter(len, runs):
                yield from self._strip(rows, run)

    def _strip(self, rows: range, keys: range) -> Iterator[Tile]:
        """Tiles of some rows; neighbours without a mask are one."""
        columns = Parts.of(keys, self.limits.columns)
        found = visible_blocks(
            self.pattern, Parts.of(rows, len(rows)), columns, self.boundaries
        )
        is_seen = np.any(found.seen, (0, 1))
        is_whole = np.all(found.whole, (0, 1)) & self.is_known
        # A tile ends before the next one that it is not joined with.
        joined = is_whole[1:] & is_whole[:-1]
        firsts = np.flatnonzero(np.concatenate(([True], ~joined)))
        lasts = np.append(firsts[1:], len(is_whole)) - 1
        for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
            if is_seen[first]:
                run = range(int(columns.starts[first]), int(columns.stops[last]))
                yield Tile.of(rows, run, is_whole=bool(is_whole[first]))


@lru_cache(maxsize=1024)
def _planned(plan: _Plan, queries: range, keys: range) -> tuple[Tile, ...]:
    """One plan for all layers."""
    return tuple(plan.tiles(queries, keys))


def _one_block(
    pattern: AttentionPattern,
    rows: range,
    columns: range,
    boundaries: Boundaries | None = None,
) -> VisibleBlocks[np.ndarray]:
    of_rows = Parts.of(rows, len(rows))
    of_columns = Parts.of(columns, len(columns))
    return visible_blocks(pattern, of_rows, of_columns, boundaries)


def _halves(run: range, at: int) -> Iterator[range]:
    """Yield what lies before a position, and from it on; empty ones are left out."""
    middle = min(max(at, run.start), run.stop)
    yield from filter(len, (range(run.start, middle), range(middle, run.stop)))


def _pieces(run: range, size: int) -> Iterator[range]:
    for start in range(run.start, run.stop, size):
        yield range(start, min(start + size, run.stop))
