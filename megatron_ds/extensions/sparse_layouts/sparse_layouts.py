"""Sparse layouts of attention, by DeepSpeed's names: pure functions of options, blocks and heads.

    fixed, causal (4 local, 1 global)   bigbird (3 sliding, 1 global)   bslongformer (global 0 and 5)

    1 . . . . . . .                     1 1 1 1 1 1 1 1                 1 1 1 1 1 1 1 1
    1 1 . . . . . .                     1 1 1 . . . . .                 1 1 1 . . 1 . .
    1 1 1 . . . . .                     1 1 1 1 . . . .                 1 1 1 1 . 1 . .
    1 1 1 1 . . . .                     1 . 1 1 1 . . .                 1 . 1 1 1 1 . .
    . . . 1 1 . . .                     1 . . 1 1 1 . .                 1 . . 1 1 1 . .
    . . . 1 1 1 . .                     1 . . . 1 1 1 .                 1 1 1 1 1 1 1 1
    . . . 1 1 1 1 .                     1 . . . . 1 1 1                 1 . . . . 1 1 1
    . . . 1 1 1 1 1                     1 . . . . . 1 1                 1 . . . . 1 1 1

Row: block of queries; column: block of keys. Random blocks are functions of a key, so they are the same on
all ranks, after a resume, and for any division of the heads.

Unlike DeepSpeed's: no block of a causal layout is above the diagonal; random blocks of a causal row are among
those up to its own, all of them where these are fewer than asked for.
"""

from collections.abc import Callable
from functools import lru_cache

import numpy as np

from ...ops.block_layout import BlockLayout
from ...ops.keyed_random import seed_of
from .sparse_options import SparseOptions

# draw(head, row, candidates, count) -> numbers of blocks
Draw = Callable[[int, int, int, int], np.ndarray]


@lru_cache(maxsize=1024)
def block_layout(
    options: SparseOptions, positions: int, heads: int, is_causal: bool, *key: int | str
) -> BlockLayout:
    """Return the layout of all heads of a layer. key: of the random blocks; without effect in other modes"""
    blocks = -(-positions // options.sparse_block)
    seen = layout(options, blocks, heads, is_causal, keyed(blocks, *key))
    return BlockLayout.of(options.sparse_block, seen)


def has_random_blocks(options: SparseOptions) -> bool:
    """Return whether layers differ."""
    return (
        options.sparse_attention in ("variable", "bigbird")
        and options.sparse_num_random_blocks > 0
    )


def keyed(blocks: int, *key: int | str) -> Draw:
    """Return a function that draws blocks by a key: those with the smallest random numbers."""

    @lru_cache(maxsize=1)
    def numbers(head: int) -> np.ndarray:
        bits = np.random.Philox(key=seed_of(*key, "sparse layout", head)).random_raw(
            blocks * blocks
        )
        return bits.reshape(blocks, blocks)

    def draw(head: int, row: int, candidates: int, count: int) -> np.ndarray:
        return numbers(head)[row, :candidates].argsort(kind="stable")[:count]

    return draw


def layout(
    options: SparseOptions, blocks: int, heads: int, is_causal: bool, draw: Draw
) -> np.ndarray:
    """bool [heads, blocks, blocks]: whether a block of queries (row) sees a block of keys (column)."""
    assert options.sparse_attention is not None, "attention is dense"
    make = LAYOUTS[options.sparse_attention]
    different = heads if options.sparse_layout_per_head else 1
    seen = np.stack(
        [make(options, blocks, head, is_causal, draw) for head in range(different)]
    )
    if is_causal:
        seen = np.tril(seen)
    return np.broadcast_to(seen, (heads, blocks, blocks)) if different == 1 else seen


def _dense(
    options: SparseOptions, blocks: int, head: int, is_causal: bool, draw: Draw
) -> np.ndarray:
    return np.ones((blocks, blocks), dtype=bool)


def _fixed(
    options: SparseOptions, blocks: int, head: int, is_causal: bool, draw: Draw
) -> np.ndarray:
    size = options.sparse_num_local_blocks
    shared = options.sparse_num_global_blocks
    seen = _windows(blocks, (size,), is_causal)
    before = size - shared * (1 + head % options.sparse_num_different_global_patterns)
    for window in range(0, blocks, size):
        first = window + before
        if window + size > blocks:
            # The last one is shorter. Below 0 it is counted from the end, as in DeepSpeed: all blocks are in
            # one window then, so that it has no effect below the diagonal.
            first = min(first, blocks - shared)
        _globally(
            seen,
            first,
            first + shared,
            is_causal,
            options.sparse_horizontal_global_attention,
        )
    return seen


def _variable(
    options: SparseOptions, blocks: int, head: int, is_causal: bool, draw: Draw
) -> np.ndarray:
    seen = _windows(blocks, options.sparse_local_window_blocks, is_causal)
    for first, stop in _global_runs(options):
        _globally(
            seen, first, stop, is_causal, options.sparse_horizontal_global_attention
        )
    return seen | _random(options, blocks, head, is_causal, draw)


def _bigbird(
    options: SparseOptions, blocks: int, head: int, is_causal: bool, draw: Draw
) -> np.ndarray:
    seen = _local(options, blocks, head, is_causal, draw) | _random(
        options, blocks, head, is_causal, draw
    )
    _globally(seen, 0, options.sparse_num_global_blocks, False, True)
    return seen


def _longformer(
    options: SparseOptions, blocks: int, head: int, is_causal: bool, draw: Draw
) -> np.ndarray:
    seen = _local(options, blocks, head, is_causal, draw)
    for first, stop in _global_runs(options):
        _globally(seen, first, stop, False, True)
    return seen


def _local(
    options: SparseOptions, blocks: int, head: int, is_causal: bool, draw: Draw
) -> np.ndarray:
    distance = np.arange(blocks)[:, None] - np.arange(blocks)
    return abs(distance) <= options.sparse_num_sliding_window_blocks // 2


# mode → the blocks of one head, before those above the diagonal are left out
LAYOUTS = {
    "dense": _dense,
    "fixed": _fixed,
    "variable": _variable,
    "bigbird": _bigbird,
    "bslongformer": _longformer,
    "local": _local,
}


def _windows(blocks: int, sizes: tuple[int, ...], is_causal: bool) -> np.ndarray:
    """Return windows of these sizes that do not overlap. The last size repeats."""
    number = np.repeat(np.arange(len(sizes)), sizes)
    rest = max(0, blocks - len(number))
    number = np.concatenate((number, len(sizes) + np.arange(rest) // sizes[-1]))[
        :blocks
    ]
    seen = number[:, None] == number
    return np.tril(seen) if is_causal else seen


def _globally(
    seen: np.ndarray, first: int, stop: int, is_causal: bool, is_horizontal: bool
) -> None:
    """Let all blocks, or those from `first` on, see the columns `first` to `stop`. is_horizontal: these rows see all"""
    seen[first if is_causal else 0 :, first:stop] = True
    if is_horizontal:
        seen[first:stop] = True


def _global_runs(options: SparseOptions) -> list[tuple[int, int]]:
    starts = options.sparse_global_block_indices
    ends = options.sparse_global_block_end_indices or tuple(
        start + 1 for start in starts
    )
    return list(zip(starts, ends, strict=True))


def _random(
    options: SparseOptions, blocks: int, head: int, is_causal: bool, draw: Draw
) -> np.ndarray:
    seen = np.zeros((blocks, blocks), dtype=bool)
    count = options.sparse_num_random_blocks
    for row in range(blocks) if count else ():
        candidates = row + 1 if is_causal else blocks
        seen[row, draw(head, row, candidates, min(count, candidates))] = True
    return seen
