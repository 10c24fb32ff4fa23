"""Spans: which units of keys the registers of a tile of queries see.

The compiled kernel (csrc/attention/attention_kernel.h) works on tiles of four registers, each with the scores of `UNIT`
queries. Keys are divided into units of `UNIT`, too, whatever the size of a layout's blocks. A *span* is a
list of units that a run of neighbouring registers sees, and the register before and after it do not:

    units        0 1 2 3 4 5             spans of this tile: registers 0 to 3, units 0 and 3
    register 0   x     x x                                   register  0,      unit  4
             1   x     x                                     registers 2 to 3, unit  5
             2   x     x   x
             3   x     x   x

So the products are of scores that the pattern shows, and of no others but those of units of which a part is
hidden. Pure values, without tensors.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from ..attention_pattern import AttentionPattern

UNIT = 16
REGISTERS = 4
AHEAD = 8  # the kernel fetches this many units before it computes with them


@dataclass(frozen=True, eq=False)
class KeySpans:
    """The spans of all heads.

    layout_of_head  int32 [n], number among the different layouts
    first           int32 [layouts, tiles + 1]: the first span of each tile, and the end of the last
    spans           int32 [spans, 4]: first unit in `units`, the one past its last, first register, the one
                    past its last
    units           int32: numbers of units of keys; after those of the last span, `AHEAD` more
    last_tile       int32 [layouts, units of keys]: the last tile that sees a unit; -1: none
    live            int32 [layouts]: the largest number of units, over tiles, that are seen by the tile, or
                    by an earlier and a later one. So many have to be packed at a time
    """

    layout_of_head: np.ndarray
    first: np.ndarray
    spans: np.ndarray
    units: np.ndarray
    last_tile: np.ndarray
    live: np.ndarray


def key_spans(
    pattern: AttentionPattern, queries: range, keys: range, heads: int
) -> KeySpans:
    """The spans of the tiles of two runs of positions, numbered within the runs.

    For a pattern with a layout, both runs begin and end at multiples of `UNIT`, and the blocks of the layout are
    multiples of it.
    """
    if pattern.layout is None:
        return _of_window(pattern, queries, keys, heads)
    layout = pattern.layout
    groups = [([*range(heads)], layout)] if layout.is_alike else layout.groups
    # Spans are listed once for all heads that share a layout.
    layout_of_head = np.empty(heads, dtype=np.int32)
    firsts = []
    spans = []
    units = []
    lives = []
    total = 0
    for number, (of_heads, alike) in enumerate(groups):
        layout_of_head[of_heads] = number
        firsts.append([len(spans)])
        seen_by = []
        for tile in _tiles(replace(pattern, layout=alike), queries, keys):
            for low, high, seen in _runs(tile):
                spans.append((total, total + len(seen), low, high))
                units.append(seen)
                total += len(seen)
            firsts[-1].append(len(spans))
            seen_by.append(tile.any(0))
        lives.append(_lives(np.array(seen_by)))
    return KeySpans(
        layout_of_head,
        np.array(firsts, dtype=np.int32),
        np.array(spans, dtype=np.int32).reshape(-1, 4),
        np.concatenate((*units, np.zeros(AHEAD))).astype(np.int32),
        *_arrays(lives),
    )


def _of_window(
    pattern: AttentionPattern, queries: range, keys: range, heads: int
) -> KeySpans:
    """The spans of a pattern without layout.

    Each register sees neighbouring units, later registers none earlier. So the units at which registers begin
    and stop to see divide a tile into its spans.
    """
    registers = -(-len(queries) // UNIT)
    units = -(-len(keys) // UNIT)
    firsts = [0]
    spans = []
    last_tile = np.full(units, -1)
    live = 0
    # The first unit that each register sees, and the one past its last.
    starts, stops = (
        numbers[:, None] for numbers in _seen_by(pattern, queries, keys, registers)
    )
    for first in range(0, registers, REGISTERS):
        start, stop = (
            numbers[first : first + REGISTERS] for numbers in (starts, stops)
        )
        # Between two edges, the same registers see all units.
        edges = np.unique((start, stop))
        some = start < stop
        if some.any():
            last_tile[start[some].min() : stop.max()] = first // REGISTERS
            live = max(live, stop.max() - start[some].min())
        sees = (start <= edges[:-1]) & (edges[:-1] < stop)  # [registers, intervals]
        for i in np.flatnonzero(sees.any(0)):
            low = int(sees[:, i].argmax())
            spans.append((edges[i], edges[i + 1], low, low + sees[:, i].sum()))
        firsts.append(len(spans))
    return KeySpans(
        np.zeros(heads, dtype=np.int32),
        np.array([firsts], dtype=np.int32),
        np.array(spans, dtype=np.int32).reshape(-1, 4),
        np.arange(units + AHEAD, dtype=np.int32),
        *_arrays([(last_tile, live)]),
    )


def _lives(seen: np.ndarray) -> tuple[np.ndarray, int]:
    """`last_tile` and `live` of one layout. seen: bool [tiles, units]."""
    tiles = len(seen)
    some = seen.any(0)
    last = np.where(some, tiles - 1 - seen[::-1].argmax(0), -1)
    begun = np.cumsum(np.bincount(seen.argmax(0)[some], minlength=tiles))
    ended = np.cumsum(np.bincount(last[some], minlength=tiles))
    return last, int((begun - np.concatenate(([0], ended[:-1]))).max())


def _arrays(lives: list[tuple[np.ndarray, int]]) -> tuple[np.ndarray, np.ndarray]:
    last_tiles, live = zip(*lives, strict=True)
    return np.stack(last_tiles).astype(np.int32), np.array(live, dtype=np.int32)


def _seen_by(
    pattern: AttentionPattern, queries: range, keys: range, registers: int
) -> tuple[np.ndarray, np.ndarray]:
    """The first unit that each register sees, and the one past the last."""
    first = queries.start + UNIT * np.arange(registers)
    last = np.minimum(first + UNIT, queries.stop) - 1
    starts = (
        np.full(registers, keys.start) if pattern.left is None else first - pattern.left
    )
    stops = (
        np.full(registers, keys.stop)
        if pattern.after is None
        else last + pattern.after + 1
    )
    starts, stops = (
        (positions - keys.start).clip(0, len(keys)) for positions in (starts, stops)
    )
    stops = np.where(stops > starts, -(-stops // UNIT), 0)
    return np.where(stops > 0, starts // UNIT, 0), stops


def _tiles(
    pattern: AttentionPattern, queries: range, keys: range
) -> Iterator[np.ndarray]:
    """bool [registers, units of keys] of each tile; the last one may have fewer registers."""
    rows, columns = (
        np.arange(run.start // UNIT, run.stop // UNIT) for run in (queries, keys)
    )
    layout = pattern.layout
    (blocks,) = layout.up_to(max(queries.stop, keys.stop))
    for first in range(0, len(rows), REGISTERS):
        registers = rows[first : first + REGISTERS]
        seen = blocks[registers * UNIT // layout.block][
            :, columns * UNIT // layout.block
        ]
        yield seen & (columns <= registers[:, None]) if pattern.causal else seen


def _runs(seen: np.ndarray) -> Iterator[tuple[int, int, np.ndarray]]:
    """(first register, one past the last, units) of the spans of a tile, wide ones first."""
    closed = np.zeros((1, seen.shape[1]), dtype=bool)
    framed = np.concatenate((closed, seen, closed))  # register r is row r + 1
    for width in range(len(seen), 0, -1):
        for low in range(len(seen) - width + 1):
            run = (
                framed[low + 1 : low + 1 + width].all(0)
                & ~framed[low]
                & ~framed[low + 1 + width]
            )
            if run.any():
                yield low, low + width, np.flatnonzero(run)
