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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ....ops.attention_pattern import AttentionPattern
from ....ops.block_layout import BlockLayout
from ....ops.visible_blocks import Parts, visible_blocks
from . import UNIT

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
    """Return the spans of the tiles of two runs of positions, numbered within the runs.

    heads: number of heads of the rank

    For a pattern with a layout, both runs begin and end at multiples of `UNIT`, and the blocks of the layout are
    multiples of it.
    """
    # The different layouts with their heads; one for a pattern without a layout.
    layout = pattern.layout
    if layout is None or layout.is_alike:
        groups: Sequence[tuple[list[int], BlockLayout | None]] = [
            ([*range(heads)], layout)
        ]
    else:
        groups = layout.groups
    # Spans are listed once for all heads that share a layout.
    layout_of_head = np.empty(heads, dtype=np.int32)
    spans: list[tuple[int, ...]] = []
    units: list[np.ndarray] = []
    plans = []
    for number, (of_heads, alike) in enumerate(groups):
        layout_of_head[of_heads] = number
        of_group = replace(pattern, layout=alike)
        plans.append(_of_group(of_group, queries, keys, spans, units))
    # The units of a window are all units in order.
    if layout is None:
        units = [np.arange(-(-len(keys) // UNIT))]
    numbers = np.concatenate((*units, np.zeros(AHEAD)))
    firsts, last_tiles, lives = zip(*plans, strict=True)
    return KeySpans(
        layout_of_head=layout_of_head,
        first=np.array(firsts, dtype=np.int32),
        spans=np.array(spans, dtype=np.int32).reshape(-1, 4),
        units=numbers.astype(np.int32),
        last_tile=np.stack(last_tiles).astype(np.int32),
        live=np.array(lives, dtype=np.int32),
    )


def _of_group(
    pattern: AttentionPattern,
    queries: range,
    keys: range,
    spans: list[tuple[int, ...]],
    units: list[np.ndarray],
) -> tuple[list[int], np.ndarray, int]:
    """`first`, `last_tile` and `live` of heads that are alike; adds their spans, and the units of a layout.

    Units of a window are neighbours, so its spans have their numbers.
    """
    # -1 is a unit that no tile sees.
    count = -(-len(keys) // UNIT)
    firsts = [len(spans)]
    first_tile = np.full(count, -1)
    last_tile = np.full(count, -1)
    total = sum(map(len, units))
    size = REGISTERS * UNIT
    tiles = range(queries.start, queries.stop, size)
    for tile, start in enumerate(tiles):
        rows = range(start, min(start + size, queries.stop))
        first, seen = _seen_units(pattern, rows, keys)
        # Of a layout in any order, wide spans first.
        spans_of_tile = _runs(seen) if pattern.layout else _intervals(seen)
        for low, high, found in spans_of_tile:
            numbers = first + found
            if pattern.layout is None:
                spans.append((int(numbers[0]), int(numbers[-1]) + 1, low, high))
            else:
                spans.append((total, total + len(numbers), low, high))
                units.append(numbers)
                total += len(numbers)
        firsts.append(len(spans))
        # The first and the last tile of each unit that is seen.
        some = first + np.flatnonzero(seen.any(0))
        last_tile[some] = tile
        is_new = first_tile[some] < 0
        first_tile[some] = np.where(is_new, tile, first_tile[some])
    return firsts, last_tile, _live(first_tile, last_tile, len(tiles))


def _seen_units(
    pattern: AttentionPattern, queries: range, keys: range
) -> tuple[int, np.ndarray]:
    """(number of a first unit, bool [registers, units from it on]) of the queries of a tile."""
    registers = Parts.of(queries, UNIT)
    near = pattern.keys_of(queries, keys)
    if not len(near):
        none = np.zeros((len(registers.starts), 0), dtype=bool)
        return 0, none
    # Whole units, from the one in which the first key is.
    first = (near.start - keys.start) // UNIT
    run = range(keys.start + first * UNIT, near.stop)
    blocks = visible_blocks(pattern, registers, Parts.of(run, UNIT))
    (seen,) = blocks.seen
    return first, seen


def _live(first_tile: np.ndarray, last_tile: np.ndarray, tiles: int) -> int:
    """Return the most units, over tiles, that were begun and are not ended."""
    # Units are begun by their first tile and ended by their last.
    some = last_tile >= 0
    begun = np.cumsum(np.bincount(first_tile[some], minlength=tiles))
    ended = np.cumsum(np.bincount(last_tile[some], minlength=tiles))
    ended_before = np.concatenate(([0], ended[:-1]))
    return int((begun - ended_before).max())


def _intervals(seen: np.ndarray) -> Iterator[tuple[int, int, np.ndarray]]:
    """(first register, one past the last, units) between two units at which other registers see, in order.

    Registers that see a unit of a window are neighbours.
    """
    differs = (seen[:, 1:] != seen[:, :-1]).any(0)
    changes = np.flatnonzero(differs) + 1
    for run in np.split(np.arange(seen.shape[1]), changes):
        if not len(run):
            continue
        # All units of a run are seen by the same registers.
        registers = seen[:, run[0]]
        if registers.any():
            low = int(registers.argmax())
            yield low, low + int(registers.sum()), run


def _runs(seen: np.ndarray) -> Iterator[tuple[int, int, np.ndarray]]:
    """(first register, one past the last, units) of the spans of a tile, wide ones first."""
    # Registers before the first and after the last see nothing.
    closed = np.zeros((1, seen.shape[1]), dtype=bool)
    framed = np.concatenate((closed, seen, closed))  # register r is row r + 1
    for width in range(len(seen), 0, -1):
        for low in range(len(seen) - width + 1):
            high = low + width
            inside = framed[low + 1 : high + 1].all(0)
            run = inside & ~framed[low] & ~framed[high + 1]
            if run.any():
                yield low, high, np.flatnonzero(run)
