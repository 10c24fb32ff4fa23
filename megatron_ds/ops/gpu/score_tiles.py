"""`ScoreTiles`: the tiles of 128 queries and 128 keys that FlexAttention computes, and which need a mask.

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

Those of a pattern are computed on the host, from numbers of blocks, without a number for each score. Those of
documents and padding are computed on the device, which has their numbers.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from ..attention_pattern import AttentionPattern
from ..block_layout import BlockLayout

TILE = 128


@dataclass(frozen=True, eq=False)
class ScoreTiles:
    """The tiles of queries (row) and keys (column), bool [b or 1, n or 1, tiles, tiles] or without samples:

    seen   whether one of the queries sees one of the keys; else the tile is not computed
    whole  whether each of the queries sees each of the keys; else it needs a mask. A last tile that is
           shorter is never whole
    """

    seen: np.ndarray | torch.Tensor
    whole: np.ndarray | torch.Tensor

    def __and__(self, other: "ScoreTiles") -> "ScoreTiles":
        """The tiles of queries that see what both let them see.

        A tile where no query sees a key through both may still be computed, with a mask.
        """
        return ScoreTiles(self.seen & other.seen, self.whole & other.whole)


def of_pattern(pattern: AttentionPattern, positions: int) -> ScoreTiles:
    """Arrays [n or 1, tiles, tiles] of whole sequences, whose queries are their keys."""
    starts, stops = _ends(positions)
    seen = np.ones((1, len(starts), len(starts)), dtype=bool)
    whole = seen & (stops - starts == TILE) & (stops - starts == TILE)[:, None]
    # of key less query
    least = starts - (stops[:, None] - 1)
    most = (stops - 1) - starts[:, None]
    if pattern.after is not None:
        seen = seen & (least <= pattern.after)
        whole = whole & (most <= pattern.after)
    if pattern.left is not None:
        seen = seen & (most >= -pattern.left)
        whole = whole & (least >= -pattern.left)
    tiles = ScoreTiles(seen, whole)
    return (
        tiles
        if pattern.layout is None
        else tiles & _of_layout(pattern.layout, positions)
    )


def _of_layout(layout: BlockLayout, positions: int) -> ScoreTiles:
    starts, stops = _ends(positions)
    # blocks of a tile
    first = starts // layout.block
    stop = -(-stops // layout.block)
    sums = np.pad(layout.up_to(positions), ((0, 0), (1, 0), (1, 0))).cumsum(1).cumsum(2)
    between = sums[:, stop] - sums[:, first]
    count = between[:, :, stop] - between[:, :, first]  # seen blocks of a tile
    return ScoreTiles(count > 0, count == np.outer(stop - first, stop - first))


def of_documents(ids: torch.Tensor) -> ScoreTiles:
    """Tensors [b, 1, tiles, tiles] of documents kept apart. ids: int64 [b, s], not decreasing in a sample"""
    padded = torch.cat(
        (ids, ids[:, -1:].expand(-1, -ids.shape[1] % TILE)), dim=1
    ).unflatten(1, (-1, TILE))
    # [b, tiles]
    first = padded[..., 0]
    last = padded[..., -1]
    seen = (first[:, :, None] <= last[:, None]) & (first[:, None] <= last[:, :, None])
    alike = (first[:, :, None] == last[:, None]) & (first[:, None] == last[:, :, None])
    return ScoreTiles(seen[:, None], alike[:, None])


def of_padding(hidden: torch.Tensor) -> ScoreTiles:
    """Tensors [b, 1, 1, tiles]. hidden: bool [b, s], keys that no query sees"""
    keys = F.pad(hidden, (0, -hidden.shape[1] % TILE), value=True).unflatten(
        1, (-1, TILE)
    )
    return ScoreTiles(~keys.all(2)[:, None, None], ~keys.any(2)[:, None, None])


def _ends(positions: int) -> tuple[np.ndarray, np.ndarray]:
    starts = np.arange(0, positions, TILE)
    return starts, np.minimum(starts + TILE, positions)
