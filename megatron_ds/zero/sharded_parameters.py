"""`ShardedParameters`: parameters in shards, gathered by units (ZeRO 3)."""

from collections.abc import Sequence

import torch
from torch import nn

from ..mpu.collectives import all_gather_into_
from ..mpu.group import DONE, Waitable
from .arrays import Array, Tier
from .data_groups import Hierarchy
from .gathering import Unit
from .layout import Layout, ShardPiece, SlotPiece
from .mapped_units import MappedUnit, SharedParts
from .memory_tier import MemoryTier
from .param_store import Draw, ParameterStore, become, fill


class ShardedParameters(ParameterStore):
    """A `ParameterStore` of parameters in shards, gathered by units (ZeRO 3).

        part     this rank's weights, in a tier: on the device, in host memory or on a disk. There are as many
                 parts as an inner group has ranks (data_groups.py), which are the ranks that gather. This
                 rank updates its shard of it
        flat     of each unit, when gathered

    unit_plans  (layer, first bucket, last bucket + 1), in the order of the buckets
    tier        of the parts, unless ranks share their memory; None: the device
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        layout: Layout,
        ranks: Hierarchy,
        unit_plans: Sequence[tuple[int, int, int]],
        device: torch.device,
        tier: Tier | None,
        draw: Draw | None,
    ):
        super().__init__(layout, ranks, sharded=True)
        tier = tier or MemoryTier(device)
        self._device = device
        here = ranks.inner.rank, ranks.inner.size
        self._parts = layout.shard_pieces(*here)
        dtype = parameters[0].dtype
        shares = ranks.inner.memory and tier.is_plain
        self._shared = SharedParts(layout, ranks.inner, dtype) if shares else None
        self._arrays = (
            self._shared.arrays
            if self._shared  # one for each bucket
            else tier.arrays([part.stop - part.start for part in self._parts], dtype)
        )
        for piece in layout.slot_intersections(*here):
            fill(
                self.values_of(piece)[: piece.stop - piece.start],
                parameters[piece.slot],
                piece.start,
                draw,
            )
        tier.settle()
        self.units = [
            self._make_unit(*unit_plan, parameters) for unit_plan in unit_plans
        ]

    @property
    def tier_bytes(self) -> int:  # type: ignore[override]
        """Bytes of this rank's parts."""
        return sum(array.tensor.nbytes for array in self._arrays)

    @property
    def is_shared(self) -> bool:
        return self._shared is not None

    @property
    def nbytes(self) -> int:
        return self.tier_bytes + sum(
            unit.nbytes for unit in self.units if not unit.is_free
        )

    def values_of(self, piece: SlotPiece) -> torch.Tensor:
        """Return the weights of a piece in this rank's part."""
        bucket = self.layout.slots[piece.slot].bucket
        start = piece.flat - self._parts[bucket].start
        return self._arrays[bucket].tensor[start : start + piece.padded_numel]

    def array_of(self, first: SlotPiece, numel: int) -> Array:
        bucket = self.layout.slots[first.slot].bucket
        start = first.flat - self._parts[bucket].start
        return self._arrays[bucket].part(start, start + numel)

    def refresh(self) -> None:
        """Make the updates of all ranks visible, when units are gathered. Collective over the outer group."""
        for unit in self.units:
            unit.claims.clear()
            unit.free()
        if self.ranks.outer.size > 1:
            shards = self.layout.shard_pieces(self.ranks.shard)
            works = [
                self._refresh_part(*of) for of in zip(self._arrays, self._parts, shards)
            ]
            for work in works:
                work.wait()

    def _refresh_part(
        self, array: Array, part: ShardPiece, shard: ShardPiece
    ) -> Waitable:
        """An offloaded array is copied to the device for it."""
        start = shard.start - part.start
        stop = shard.stop - part.start
        if array.is_at(self._device, array.tensor.dtype):
            return all_gather_into_(
                array.tensor, array.tensor[start:stop], self.ranks.outer, async_op=True
            )
        near = torch.empty(
            part.stop - part.start, dtype=array.tensor.dtype, device=self._device
        )
        array.part(start, stop).read(near[start:stop]).wait()
        all_gather_into_(near, near[start:stop], self.ranks.outer)
        array.write(near).wait()
        return DONE

    def _make_unit(
        self, layer: int, first: int, stop: int, parameters: Sequence[nn.Parameter]
    ) -> Unit:
        buckets = self.layout.buckets[first:stop]
        group = self.ranks.gathering
        start = buckets[0].start
        dtype = parameters[0].dtype
        if self._shared:
            unit: Unit = MappedUnit(
                layer, first, stop - 1, dtype, self._shared.map(first, stop), group
            )
        else:
            flat = torch.empty(
                buckets[-1].stop - start, dtype=dtype, device=self._device
            )
            unit = Unit(layer, first, stop - 1, flat, group)
        unit.buckets = [
            (unit.flat[bucket.start - start : bucket.stop - start], array)
            for bucket, array in zip(buckets, self._arrays[first:stop])
        ]
        show_unit(unit, self.layout, parameters)
        return unit


def show_unit(unit: Unit, layout: Layout, parameters: Sequence[nn.Parameter]) -> None:
    """Make the parameters of a new unit views of its flat buffer, then free it.

    parameters: of the whole set, by slot
    """
    buckets = layout.buckets[unit.first_bucket : unit.last_bucket + 1]
    start = buckets[0].start
    for i in range(buckets[0].first_slot, buckets[-1].last_slot):
        slot = layout.slots[i]
        p = parameters[i]
        become(p, unit.flat[slot.start - start : slot.stop - start].view(p.shape))
    unit.free()  # only now: views cannot be made of a storage of no bytes
