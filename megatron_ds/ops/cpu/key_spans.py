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
from ..visible_blocks import Parts, visible_blocks

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
    layout = pattern.layout
    is_one = layout is None or layout.is_alike
    groups = [([*range(heads)], layout)] if is_one else layout.groups
    # Spans are listed once for all heads that share a layout.
    layout_of_head = np.empty(heads, dtype=np.int32)
    spans: list[tuple[int, ...]] = []
    units: list[np.ndarray] = []
    plans = []
    for number, (of_heads, alike) in enumerate(groups):
        layout_of_head[of_heads] = number
        of_group = replace(pattern, layout=alike)
        plans.append(_of_group(of_group, queries, keys, spans, units))
    if layout is None:
        units = [np.arange(-(-len(keys) // UNIT))]
    firsts, last_tiles, lives = zip(*plans, strict=True)
    return KeySpans(
        layout_of_head,
        np.array(firsts, dtype=np.int32),
        np.array(spans, dtype=np.int32).reshape(-1, 4),
        np.concatenate((*units, np.zeros(AHEAD))).astype(np.int32),
        np.stack(last_tiles).astype(np.int32),
        np.array(lives, dtype=np.int32),
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
    count = -(-len(keys) // UNIT)
    firsts = [len(spans)]
    first_tile = np.full(count, -1)
    last_tile = np.full(count, -1)
    total = sum(map(len, units))
    tiles = range(queries.start, queries.stop, REGISTERS * UNIT)
    for tile, start in enumerate(tiles):
        rows = range(start, min(start + REGISTERS * UNIT, queries.stop))
        first, seen = _seen_units(pattern, rows, keys)
        # Of a layout in any order, wide spans first.
        for low, high, found in _runs(seen) if pattern.layout else _intervals(seen):
            numbers = first + found
            if pattern.layout is None:
                spans.append((int(numbers[0]), int(numbers[-1]) + 1, low, high))
            else:
                spans.append((total, total + len(numbers), low, high))
                units.append(numbers)
                total += len(numbers)
        firsts.append(len(spans))
        some = first + np.flatnonzero(seen.any(0))
        last_tile[some] = tile
        first_tile[some] = np.where(first_tile[some] < 0, tile, first_tile[some])
    return firsts, last_tile, _live(first_tile, last_tile, len(tiles))


def _seen_units(
    pattern: AttentionPattern, queries: range, keys: range
) -> tuple[int, np.ndarray]:
    """(number of a first unit, bool [registers, units from it on]) of the queries of a tile."""
    registers = Parts.of(queries, UNIT)
    near = pattern.keys_of(queries, keys)
    if not len(near):
        return 0, np.zeros((len(registers.starts), 0), dtype=bool)
    first = (near.start - keys.start) // UNIT
    run = range(keys.start + first * UNIT, near.stop)
    (seen,) = visible_blocks(pattern, registers, Parts.of(run, UNIT)).seen
    return first, seen


def _live(first_tile: np.ndarray, last_tile: np.ndarray, tiles: int) -> int:
    """The most units, over tiles, that were begun and are not ended."""
    some = last_tile >= 0
    begun = np.cumsum(np.bincount(first_tile[some], minlength=tiles))
    ended = np.cumsum(np.bincount(last_tile[some], minlength=tiles))
    return int((begun - np.concatenate(([0], ended[:-1]))).max())


def _intervals(seen: np.ndarray) -> Iterator[tuple[int, int, np.ndarray]]:
    """(first register, one past the last, units) between two units at which other registers see, in order.

    Registers that see a unit of a window are neighbours.
    """
    changes = np.flatnonzero((seen[:, 1:] != seen[:, :-1]).any(0)) + 1
    for run in np.split(np.arange(seen.shape[1]), changes):
        if len(run) and seen[:, run[0]].any():
            low = int(seen[:, run[0]].argmax())
            yield low, low + int(seen[:, run[0]].sum()), run


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
