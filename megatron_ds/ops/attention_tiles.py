"""Tiles of a matrix of attention scores: which parts of a block must be computed, and which need a mask.

Queries and keys of a block are runs of positions, such as the two chunks that a context-parallel rank holds.
`Seen.tiles` divides the block into tiles, of which hidden ones are left out, so a causal mask, a window or
separate documents save the work that they hide:

    queries | 0 1 2 3 | 12 13 14 15         keys 4 .. 11 of another rank, causal:
                                            0 .. 3    see nothing: no tile
                                            12 .. 15  see all of them: one tile without a mask

Only numbers of the host decide: document ids on a GPU are not read. Without boundaries of documents
(`data.documents`), ids mask elements and save no work.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from .alibi import Alibi
from .attention_pattern import AttentionPattern

# of a tile whose elements may be hidden
ROWS = 512
COLUMNS = 1024
ROWS_OF_LAYOUT = 128  # of a tile of a block layout
GAP = 64  # keys between two of its tiles, of which no query sees any


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
    """

    rows: slice
    columns: slice
    queries: range
    keys: range
    is_whole: bool


Keep = Callable[[Tile], tuple[torch.Tensor, float]]


@dataclass(frozen=True)
class Seen:
    """Which keys a query sees.

    pattern    by positions, or by blocks of the heads that attend
    documents  `data.documents.Documents` of the samples: a query sees keys of its own one only; None: of all
    mask       bool [b or 1, n or 1, s or 1, s], True where a query does not see a key; None: nothing more
    keep       tile → (bool [b, n, rows, columns], scale of kept probabilities); None without dropout
    alibi      added to the scores of the heads; None: nothing
    """

    pattern: AttentionPattern
    documents: Any = None
    mask: torch.Tensor | None = None
    keep: Keep | None = None
    alibi: Alibi | None = None

    def tiles(self, queries: Runs, keys: Runs, by_runs: bool = False) -> Iterator[Tile]:
        """The tiles of a block, by rows, then by columns; each element is in one tile at most.

        by_runs: a tile is a run of queries and one of keys that some of them see, for a kernel that looks for
        the keys itself
        """
        parts = self._whole_runs if by_runs else self._parts
        for first_row, rows in queries:
            for first_column, columns in keys:
                for part, seen, is_whole in parts(rows, columns):
                    yield Tile(
                        _slice(part, rows, first_row),
                        _slice(seen, columns, first_column),
                        part,
                        seen,
                        is_whole,
                    )

    def hidden(
        self, tile: Tile, device: torch.device | str = "cpu"
    ) -> torch.Tensor | None:
        """bool [b or 1, n or 1, rows, columns], True where a query does not see a key; None: nowhere."""
        if tile.is_whole:
            return None
        q, k = (
            torch.arange(r.start, r.stop, device=device)
            for r in (tile.queries, tile.keys)
        )
        hidden = self.pattern.mask(q, k)
        masks = [] if hidden is None else [hidden]
        rows, columns = (slice(r.start, r.stop) for r in (tile.queries, tile.keys))
        if self.documents is not None:
            ids = self.documents.ids
            masks.append((ids[:, rows, None] != ids[:, None, columns])[:, None])
        if self.mask is not None:
            masks.append(
                self.mask[
                    :, :, rows if self.mask.shape[2] > 1 else slice(None), columns
                ]
            )
        for other in masks[1:]:
            masks[0] = masks[0] | other
        return masks[0] if masks else None

    def _parts(
        self, queries: range, keys: range
    ) -> Iterator[tuple[range, range, bool]]:
        """(queries, keys, whether no mask is needed) of the tiles of two runs."""
        if self.pattern.layout is not None:
            yield from self._parts_of_layout(queries, keys)
            return
        for rows in self._sections(queries):
            for columns in _halves(self._seen_by(rows, keys), rows.start):
                if self.is_bare and self._sees_all(rows, columns):
                    yield rows, columns, True
                elif self.is_triangle(rows, columns):
                    yield rows, columns, False
                else:
                    for piece in _pieces(rows, ROWS):
                        for part, is_whole in self._columns(
                            piece, self._seen_by(piece, columns)
                        ):
                            yield piece, part, is_whole

    def _sections(self, queries: range) -> Iterator[range]:
        """Parts of a run of queries: a document of at least ROWS positions is one, as it may need no mask.
        So are all positions between two of these. Documents of several samples end wherever one of them
        does."""
        starts = {queries.start, queries.stop}
        for sample in self._boundaries or () if self.is_bare else ():
            starts.update(
                sample[
                    bisect_right(sample, queries.start) : bisect_left(
                        sample, queries.stop
                    )
                ]
            )
        first = queries.start
        for start, stop in pairwise(sorted(starts)):
            if stop - start >= ROWS:
                if first < start:
                    yield range(first, start)
                yield range(start, stop)
                first = stop
        if first < queries.stop:
            yield range(first, queries.stop)

    def _whole_runs(
        self, queries: range, keys: range
    ) -> Iterator[tuple[range, range, bool]]:
        seen = self._seen_by(queries, keys)
        layout = self.pattern.layout
        if len(seen) and (layout is None or any(layout.runs(queries, seen, GAP))):
            yield queries, keys, False

    def _parts_of_layout(
        self, queries: range, keys: range
    ) -> Iterator[tuple[range, range, bool]]:
        for rows in _pieces(queries, ROWS_OF_LAYOUT):
            for run in self.pattern.layout.runs(rows, self._seen_by(rows, keys), GAP):
                for columns in _pieces(run, COLUMNS):
                    yield rows, columns, self.is_bare and self._sees_all(rows, columns)

    def _columns(self, queries: range, keys: range) -> Iterator[tuple[range, bool]]:
        """Pieces of the keys, and whether all is seen; neighbours of which all is seen are joined."""
        start = keys.start
        for piece in _pieces(keys, COLUMNS):
            if self.is_bare and self._sees_all(queries, piece):
                continue
            if start < piece.start:
                yield range(start, piece.start), True
            yield piece, False
            start = piece.stop
        if start < keys.stop:
            yield range(start, keys.stop), True

    def _seen_by(self, queries: range, keys: range) -> range:
        """The keys from the first to the last one that any of the queries sees in any sample."""
        seen = self.pattern.keys_of(queries, keys)
        if not self._boundaries or not len(seen):
            return seen
        runs = []
        for sample in self._boundaries:
            before = bisect_right(sample, queries.start)
            after = bisect_left(sample, queries.stop)
            first = max(seen.start, sample[before - 1] if before > 0 else 0)
            last = min(seen.stop, sample[after] if after < len(sample) else seen.stop)
            if first < last:
                runs.append((first, last))
        return (
            range(min(run[0] for run in runs), max(run[1] for run in runs))
            if runs
            else range(0)
        )

    def _sees_all(self, queries: range, keys: range) -> bool:
        if self.mask is not None or not self.pattern.sees_all(queries, keys):
            return False
        return self._is_one_document(
            min(queries.start, keys.start), max(queries.stop, keys.stop) - 1
        )

    def _is_one_document(self, first: int, last: int) -> bool:
        """Whether all positions from `first` to `last` are known to be of one document in each sample."""
        if self.documents is None:
            return True
        return self._boundaries is not None and all(
            bisect_right(sample, first) == bisect_right(sample, last)
            for sample in self._boundaries
        )

    @property
    def _boundaries(self) -> tuple[tuple[int, ...], ...] | None:
        """None without documents, and where theirs are unknown."""
        return None if self.documents is None else self.documents.boundaries

    @property
    def is_bare(self) -> bool:
        """Whether a tile needs memory for a mask only, so that tiles without one may be large."""
        return self.keep is None and self.alibi is None

    @property
    def is_of_runs(self) -> bool:
        """Whether positions and documents of runs determine all that is hidden and added: there is no
        dropout, and each sample hides the same keys from all its queries."""
        has_places = self.alibi is not None and self.alibi.places is not None
        is_padding = self.mask is None or self.mask.shape[1:3] == (1, 1)
        return self.keep is None and not has_places and is_padding

    def is_triangle(self, queries: range, keys: range) -> bool:
        """Whether these are the same positions and nothing but later keys is hidden, so that a kernel with a
        causal mask of its own computes the tile."""
        return (
            queries == keys
            and self.is_bare
            and self.pattern.causal
            and self.pattern.is_plain
            and self.mask is None
            and self._is_one_document(queries.start, queries.stop - 1)
        )


def _halves(run: range, at: int) -> Iterator[range]:
    """What lies before a position, and from it on; empty ones are left out."""
    middle = min(max(at, run.start), run.stop)
    yield from filter(len, (range(run.start, middle), range(middle, run.stop)))


def _pieces(run: range, size: int) -> Iterator[range]:
    for start in range(run.start, run.stop, size):
        yield range(start, min(start + size, run.stop))


def _slice(part: range, run: range, first: int) -> slice:
    """The rows of `part` in a tensor whose row `first` is the first position of `run`."""
    return slice(first + part.start - run.start, first + part.stop - run.start)
