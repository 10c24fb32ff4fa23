"""ZeRO 3 with weights that are sent as integers: `QuantizedParameters`, a `ParameterStore`; `QuantizedUnit`.

    master     fp32, of the owner's shard              never quantized, and what checkpoints contain
    shard      the owner's, in the model's dtype       rounded from the master in the update
    part       codes and scales, 1/h of every bucket   from the shards of the outer group, once an update
    flat       what `part` of all inner ranks means    in the model's dtype, while a layer is gathered

(Wang et al. 2023, arXiv:2306.10209, sections 3.1 (qwZ) and 3.2 (hpZ).) Weights are encoded once in an update,
by their owner. What is gathered over the outer group, then over the inner one, are the same codes: all ranks,
the owner too, compute with the same numbers in forward and backward, and two hops round no more than one.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from ..host.large_pages import huge_page_zeros
from ..host.side_streams import side_stream
from ..host.transfers import Then
from ..mpu.group import DONE, Group, Waitable
from .arrays import Array
from .data_groups import Hierarchy
from .gathering import Unit
from .layout import Layout, ShardPiece, SlotPiece
from .number_blocks import Blocks, EncodedBlocks, gather_into
from .param_store import Draw, ParameterStore, fill
from .sharded_parameters import show_unit


class QuantizedUnit(Unit):
    """A unit whose parts are encoded. parts: this rank's part of each bucket."""

    def __init__(
        self,
        layer: int,
        first_bucket: int,
        last_bucket: int,
        flat: torch.Tensor,
        group: Group,
        blocks: Blocks,
    ):
        super().__init__(layer, first_bucket, last_bucket, flat, group)
        self._blocks = blocks
        self.parts: list[tuple[torch.Tensor, EncodedBlocks]] = []

    @property
    def gather_bytes(self) -> int:
        return self.nbytes + self._blocks.nbytes(self.numel)

    def fetch(self) -> None:
        """Does nothing: parts are on the device."""

    def start(self) -> None:
        if not self.is_free:
            return
        self.flat.untyped_storage().resize_(self.nbytes)
        self.is_free = False
        stream = side_stream(self.flat.device, "gathers")
        with stream.behind_current():
            works: list[Waitable] = [
                self._gather(whole, part) for whole, part in self.parts
            ]
            if self.flat.is_cuda:
                for work in works:  # that stream waits, and decodes
                    work.wait()
                works = [stream.mark()]
        self._works = works

    def _gather(self, whole: torch.Tensor, part: EncodedBlocks) -> Then:
        if self.group.size == 1:
            return Then(DONE, partial(self._blocks.decode, part, whole))
        received = part.like(self.group.size)
        return Then(
            gather_into(received, part, self.group),
            partial(self._blocks.decode, received, whole),
        )


class BlockParameters(ParameterStore):
    """A `ParameterStore` whose layers are decoded as they are gathered. A base class, which has the units.

    _parts  this rank's part of each bucket, as codes and scales
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        layout: Layout,
        ranks: Hierarchy,
        sharded: bool,
        device: torch.device,
        blocks: Blocks,
    ):
        super().__init__(layout, ranks, sharded)
        self._blocks = blocks
        self._device = device
        self._dtype = parameters[0].dtype
        self._parts: list[EncodedBlocks] = []

    @property
    def nbytes(self) -> int:
        encoded = sum(part.nbytes for part in self._parts)
        return encoded + sum(unit.nbytes for unit in self.units if not unit.is_free)

    def _free_all(self) -> None:
        for unit in self.units:
            unit.claims.clear()
            unit.free()

    def _make_unit(
        self, layer: int, first: int, stop: int, parameters: Sequence[nn.Parameter]
    ) -> QuantizedUnit:
        """Return the unit of a layer with the buckets from `first` to before `stop`."""
        buckets = self.layout.buckets[first:stop]
        start = buckets[0].start
        numel = buckets[-1].stop - start
        flat = torch.empty(numel, dtype=self._dtype, device=self._device)
        unit = QuantizedUnit(
            layer, first, stop - 1, flat, self.ranks.gathering, self._blocks
        )
        for bucket, part in zip(buckets, self._parts[first:stop]):
            whole = flat[bucket.start - start : bucket.stop - start]
            unit.parts.append((whole, part))
        show_unit(unit, self.layout, parameters)
        return unit


class QuantizedParameters(BlockParameters):
    """A `ParameterStore` of parameters in shards, gathered by units in blocks of integers.

    unit_plans  (layer, first bucket, last bucket + 1), in the order of the buckets
    blocks      the format; a multiple of its length divides every shard
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        layout: Layout,
        ranks: Hierarchy,
        unit_plans: Sequence[tuple[int, int, int]],
        device: torch.device,
        blocks: Blocks,
        draw: Draw | None,
    ):
        super().__init__(parameters, layout, ranks, True, device, blocks)
        self._flat = huge_page_zeros(
            layout.shard_numel, dtype=self._dtype, device=device
        )
        self._shards = layout.shard_pieces(ranks.shard)
        self._pieces = layout.shard_pieces(ranks.inner.rank, ranks.inner.size)
        by_bucket: list[list[SlotPiece]] = [[] for _ in layout.buckets]
        for piece in layout.slot_intersections(ranks.inner.rank, ranks.inner.size):
            by_bucket[layout.slots[piece.slot].bucket].append(piece)
        self._parts = [
            self._first_part(part, shard, pieces, parameters, draw)
            for part, shard, pieces in zip(self._pieces, self._shards, by_bucket)
        ]
        self.units = [
            self._make_unit(*unit_plan, parameters) for unit_plan in unit_plans
        ]

    @property
    def nbytes(self) -> int:
        return self._flat.nbytes + super().nbytes

    def values_of(self, piece: SlotPiece) -> torch.Tensor:
        """Return the weights of a piece of this rank's shard, before they are encoded."""
        return self._flat[piece.offset : piece.offset + piece.padded_numel]

    def array_of(self, first: SlotPiece, numel: int) -> Array:
        return Array(self._flat[first.offset : first.offset + numel])

    def refresh(self) -> None:
        """Encode this rank's shards, and gather those of the outer group. Collective over it."""
        self._free_all()
        works = []
        for encoded, part, shard in zip(self._parts, self._pieces, self._shards):
            numel = shard.stop - shard.start
            start = shard.start - part.start
            mine = self._blocks.part(encoded, start, start + numel)
            mine.copy_(
                self._blocks.encode(self._flat[shard.offset : shard.offset + numel])
            )
            works.append(gather_into(encoded, mine, self.ranks.outer))
        for work in works:
            work.wait()

    def _first_part(
        self,
        part: ShardPiece,
        shard: ShardPiece,
        pieces: Sequence[SlotPiece],
        parameters: Sequence[nn.Parameter],
        draw: Draw | None,
    ) -> EncodedBlocks:
        """Return the part of a bucket, from initial values: those of other ranks' shards are drawn here too."""
        numel = part.stop - part.start
        near = torch.zeros(numel, dtype=self._dtype, device=self._device)
        for piece in pieces:
            at = piece.flat - part.start
            fill(
                near[at : at + piece.stop - piece.start],
                parameters[piece.slot],
                piece.start,
                draw,
            )
        at = shard.start - part.start
        numel = shard.stop - shard.start
        self._flat[shard.offset : shard.offset + numel].copy_(near[at : at + numel])
        return self._blocks.encode(near)
