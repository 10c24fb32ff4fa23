"""`ParamStore`: the parameters of one set, whole on every rank, in a flat buffer.

    fp32 model     flat  |w2|b2| w1 |     the update writes the model itself
    16-bit model   flat  |w2|b2| w1 |     the update writes fp32 masters, kept elsewhere, and rounds them into flat

With sharded optimizer state each rank updates its shard and the ranks gather the rest, bucket by bucket, in place.
"""

from collections.abc import Sequence

import torch
from torch import nn

from ..host.memory_maps import huge_page_zeros
from ..mpu.collectives import all_gather_into_
from .data_groups import Hierarchy
from .layout import Layout, SlotPiece
from .tiers import Array, InMemory
from .units import Draw, become, fill


class ParamStore:
    """Moves the parameters into one flat buffer: their `data` become views of it.

    parameters  in the order of layout.slots, all of one dtype
    ranks       those that hold the same parameters
    sharded     each rank updates its shard only
    draw        gives the values of parameters on "meta"
    """

    def __init__(self, parameters: Sequence[nn.Parameter], layout: Layout, ranks: Hierarchy, sharded: bool,
                 device: torch.device | None = None, draw: Draw | None = None):
        self.layout, self.ranks, self.sharded = layout, ranks, sharded
        self.pieces = layout.slot_intersections(ranks.shard) if sharded else layout.whole_slots()
        first = parameters[0]
        self.flat = huge_page_zeros(layout.numel, dtype=first.dtype, device=device or first.device)
        _move_into(self.flat, parameters, layout, draw)

    @property
    def nbytes(self) -> int:
        return self.flat.nbytes

    def values_of(self, piece: SlotPiece) -> torch.Tensor:
        """The model's weights of a piece, padding included: a view."""
        return self.flat[piece.flat:piece.flat + piece.padded_numel]

    def array_of(self, first: SlotPiece, numel: int) -> Array:
        """Those of `numel` elements from the beginning of a piece on, in one bucket."""
        return InMemory(self.flat[first.flat:first.flat + numel])

    def refresh(self) -> None:
        """This rank's share was updated: the others' too, on return. Collective where sharded."""
        if not self.sharded:
            return
        layout, ranks = self.layout, self.ranks
        shards, parts = layout.shard_pieces(ranks.shard), layout.shard_pieces(ranks.inner.rank, ranks.inner.size)
        for wholes, mine, group in ((parts, shards, ranks.outer), (layout.buckets, parts, ranks.inner)):
            works = [all_gather_into_(self.flat[whole.start:whole.stop], self.flat[own.start:own.stop], group, async_op=True)
                     for whole, own in zip(wholes, mine)]
            for work in works:
                work.wait()


def _move_into(flat: torch.Tensor, parameters: Sequence[nn.Parameter], layout: Layout, draw: Draw | None) -> None:
    for slot, p in zip(layout.slots, parameters):
        view = flat[slot.start:slot.stop]
        fill(view, p, 0, draw)
        become(p, view.view(p.shape))
