"""`ParamStore`: the parameters of one set in a flat buffer, and the fp32 values that the optimizer updates.

    fp32 model     flat  |w2|b2| w1 |     masters *are* parts of `flat`: the update writes the model itself
    16-bit model   flat  |w2|b2| w1 |     `master`, fp32: as long as flat when the optimizer state is whole on every rank,
                                          else this rank's shard only; cast into flat after the update

With sharded optimizer state each rank updates its shard and the ranks gather the rest, bucket by bucket, in place.
"""

from collections.abc import Sequence

import torch
from torch import nn

from ..mpu.collectives import all_gather_into_
from ..mpu.group import Group
from ..ops.huge_pages import huge_page_zeros
from .layout import Layout, SlotPiece
from .units import Draw, become, fill


class ParamStore:
    """Moves the parameters into one flat buffer (their `data` become views of it) and keeps the masters.

    parameters  in the order of layout.slots, all of one dtype
    group       the ranks that hold the same parameters
    sharded     the masters are split over the group
    draw        gives the values of parameters on "meta"
    """

    def __init__(self, parameters: Sequence[nn.Parameter], layout: Layout, group: Group, sharded: bool,
                 device: torch.device | None = None, draw: Draw | None = None):
        self.layout, self.group, self.sharded = layout, group, sharded
        self.pieces = layout.slot_intersections(group.rank) if sharded else layout.whole_slots()
        first = parameters[0]
        device = device or first.device
        self.flat = huge_page_zeros(layout.numel, dtype=first.dtype, device=device)
        _move_into(self.flat, parameters, layout, draw)
        self.master = None
        if first.dtype != torch.float32:
            numel = layout.shard_numel if sharded else layout.numel
            self.master = huge_page_zeros(numel, device=device)
            self._copy(to_masters=True)

    @property
    def nbytes(self) -> int:
        """Bytes of parameters, masters not counted."""
        return self.flat.nbytes

    def master_of(self, piece: SlotPiece) -> torch.Tensor:
        """The fp32 values of a piece, padding included: a view."""
        buffer, start = (self.flat, piece.flat) if self.master is None else (self.master, piece.offset)
        return buffer[start:start + piece.padded_numel]

    def low_of(self, piece: SlotPiece) -> torch.Tensor | None:
        """The 16-bit values of the same elements, which the model computes with: a view. None where the masters are those."""
        return None if self.master is None else self.flat[piece.flat:piece.flat + piece.padded_numel]

    def write_back(self, cast: bool) -> None:
        """Masters → model parameters, on every rank of the group. Collective where sharded.

        cast: False when this rank's own part of a 16-bit model is in line with the masters already.
        """
        if cast and self.master is not None and not self.sharded:
            self._copy(to_masters=False)
        if not self.sharded:
            return
        works = []
        for piece, bucket in zip(self.layout.shard_pieces(self.group.rank), self.layout.buckets):
            mine = self.flat[piece.start:piece.stop]
            if cast and self.master is not None:
                mine.copy_(self.master[piece.offset:piece.offset + mine.numel()])
            # The next bucket is cast while this one travels.
            works.append(all_gather_into_(self.flat[bucket.start:bucket.stop], mine, self.group, async_op=True))
        for work in works:
            work.wait()

    def _copy(self, to_masters: bool) -> None:
        pairs = [(self.flat, self.master)]
        if self.sharded:
            pairs = [(self.flat[p.start:p.stop], self.master[p.offset:p.offset + p.stop - p.start])
                     for p in self.layout.shard_pieces(self.group.rank)]
        for flat, master in pairs:
            (master if to_masters else flat).copy_(flat if to_masters else master)


def _move_into(flat: torch.Tensor, parameters: Sequence[nn.Parameter], layout: Layout, draw: Draw | None) -> None:
    for slot, p in zip(layout.slots, parameters):
        view = flat[slot.start:slot.stop]
        fill(view, p, 0, draw)
        become(p, view.view(p.shape))
