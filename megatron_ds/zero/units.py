"""`ShardedParams`: parameters of which each data-parallel rank keeps its shard, gathered by *units* (ZeRO 3).

Terms:  a *unit* is what one layer owns of a set of parameters, a run of whole buckets: what is gathered at a time.
        Its *flat* buffer holds the parameters while they are whole; they are views of it all the time.
        *Free* means that the flat buffer has a storage of no bytes, or addresses without memory; *whole* that it is gathered.

    part     this rank's weights, in their home: on the device, or offloaded to the host or a disk; one of as many as an inner
             group has ranks (hierarchy.py), which are the ranks that gather. Of it, this rank updates its shard
    flat     of each unit, when gathered

Note: why the storage and not the tensor. Autograd, saved tensors and layers hold the parameter, or views of it, from forward
to backward. Shrinking the storage to nothing and growing it again leaves all of them valid; their contents are undefined
until the next gather. Refilling goes through `flat`, whose version counter is not the parameters': to autograd, a parameter
that was freed and gathered again has not changed. (It has the same values. The update comes when no graph is alive.)
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn

from ..host.async_io import aligned_empty
from ..host.shared_memory import Mapping
from ..mpu.collectives import all_gather_into_
from ..mpu.group import DONE, Group, Work
from ..mpu.param_spec import ParamSpec
from .data_groups import Hierarchy
from .layout import Layout, ShardPiece, SlotPiece
from .shared_parts import SharedParts
from .tiers import Array, Home

Draw = Callable[[ParamSpec, int, torch.Tensor], None]
"""Fills a flat tensor with the initial values of elements [start, start + len) of a local parameter."""


class Unit:
    """The parameters that layer `layer` owns of a set.

    buckets  for each bucket of the unit: its place in `flat`, this rank's part of it
    nbytes   of the flat buffer, when whole
    claims   who needs it whole: it is freed when the last one lets go
    """

    def __init__(self, layer: int, first_bucket: int, last_bucket: int, flat: torch.Tensor, group: Group):
        self.layer, self.numel, self.first_bucket, self.last_bucket = layer, flat.numel(), first_bucket, last_bucket
        self.flat, self.nbytes, self.group = flat, flat.nbytes, group
        self.buckets: list[tuple[torch.Tensor, Array]] = []
        self.claims: set = set()
        self.is_free = False
        self._works: list[Work] = []
        self._near: list[tuple[torch.Tensor, Work]] | None = None      # shards on the device, or on their way

    def fetch(self) -> None:
        """Begin to bring the shards to the device, unless they are there or the unit is whole."""
        if self.is_free and self._near is None:
            self._near = [self._fetch(array) for _, array in self.buckets]

    def start(self) -> None:
        """Begin to gather, unless it is whole or on its way. Collective."""
        if not self.is_free:
            return
        self.fetch()
        self.flat.untyped_storage().resize_(self.nbytes)
        self.is_free = False
        for (whole, _), (shard, work) in zip(self.buckets, self._near):
            work.wait()
            self._works.append(all_gather_into_(whole, shard, self.group, async_op=True))

    def wait(self) -> None:
        """The parameters are whole on return."""
        for work in self._works:
            work.wait()
        self._works = []
        if not self.is_free:
            self._near = None       # gathered, so nobody reads them any more

    def _fetch(self, array: Array) -> tuple[torch.Tensor, Work]:
        if array.is_at(self.flat.device, self.flat.dtype):
            return array.tensor, DONE
        make = aligned_empty if self.flat.device.type == "cpu" else partial(torch.empty, device=self.flat.device)
        buffer = make(array.padded_numel, dtype=self.flat.dtype)
        return buffer[:array.tensor.numel()], array.read(buffer)

    def free(self) -> None:
        self.wait()
        for _, work in self._near or ():        # fetched for nothing
            work.wait()
        self._near = None
        if not self.is_free:
            self.flat.untyped_storage().resize_(0)
            self.is_free = True


class MappedUnit(Unit):
    """Of ranks that see each other's parts: whole when their pages are mapped, one part after the other.

    A gather is counted as one, and moves nothing. When it is free, `flat` has addresses that nobody may touch.
    """

    def __init__(self, layer: int, first_bucket: int, last_bucket: int, dtype: torch.dtype, mapping: Mapping, group: Group):
        super().__init__(layer, first_bucket, last_bucket, mapping.bytes.view(dtype), group)
        self._mapping, self._is_there = mapping, False

    def fetch(self) -> None:
        pass

    def start(self) -> None:
        if self.is_free:
            self.is_free = False
            for whole, _ in self.buckets:
                self.group.traffic.add("all_gather", self.group.axes, self.group.size, whole.nbytes)

    def wait(self) -> None:
        if not self.is_free and not self._is_there:
            self._mapping.populate()
            self._is_there = True

    def free(self) -> None:
        self._mapping.drop()
        self.is_free, self._is_there = True, False


class ShardedParams:
    """The surface of `ParamStore`, for parameters that live in shards.

    parameters  in the order of layout.slots, all of one dtype, on any device or on "meta"
    units       (layer, first bucket, last bucket + 1), in the order of the buckets
    home        of the parts, unless other ranks see them where they lie
    draw        gives the values of parameters on "meta"
    """

    sharded = True

    def __init__(self, parameters: Sequence[nn.Parameter], layout: Layout, ranks: Hierarchy,
                 units: Sequence[tuple[int, int, int]], device: torch.device, home: Home, draw: Draw | None):
        self.layout, self.ranks, self._device = layout, ranks, device
        self.pieces = layout.slot_intersections(ranks.shard)
        here = ranks.inner.rank, ranks.inner.size
        self._parts = layout.shard_pieces(*here)
        dtype = parameters[0].dtype
        self._shared = SharedParts(layout, ranks.inner, dtype) if ranks.inner.memory and home.is_plain else None
        self._arrays = (self._shared.arrays if self._shared
                        else home.arrays([part.stop - part.start for part in self._parts], dtype))      # one a bucket
        for piece in layout.slot_intersections(*here):
            fill(self.values_of(piece)[:piece.stop - piece.start], parameters[piece.slot], piece.start, draw)
        home.settle()
        self.units: list[Unit] = []
        for layer, first, stop in units:
            self.units.append(self._make_unit(layer, first, stop, dtype, device))
            self._adopt(self.units[-1], parameters)

    @property
    def shard_bytes(self) -> int:
        return sum(array.tensor.nbytes for array in self._arrays)

    @property
    def is_shared(self) -> bool:
        """Whether other ranks see the parts where they lie."""
        return self._shared is not None

    @property
    def nbytes(self) -> int:
        """Bytes of parameters held now, wherever they are."""
        return self.shard_bytes + sum(unit.nbytes for unit in self.units if not unit.is_free)

    def values_of(self, piece: SlotPiece) -> torch.Tensor:
        """The model's weights of a piece of this rank's part, padding included: a view."""
        bucket = self.layout.slots[piece.slot].bucket
        start = piece.flat - self._parts[bucket].start
        return self._arrays[bucket].tensor[start:start + piece.padded_numel]

    def array_of(self, first: SlotPiece, numel: int) -> Array:
        """Those of `numel` elements from the beginning of a piece on, in one bucket."""
        bucket = self.layout.slots[first.slot].bucket
        start = first.flat - self._parts[bucket].start
        return self._arrays[bucket].part(start, start + numel)

    def refresh(self) -> None:
        """The shards were updated: bring the parts up to date. Collective over the outer group; units are gathered when they
        are needed."""
        for unit in self.units:
            unit.claims.clear()
            unit.free()
        if self.ranks.outer.size > 1:
            shards = self.layout.shard_pieces(self.ranks.shard)
            works = [self._refresh_part(*of) for of in zip(self._arrays, self._parts, shards)]
            for work in works:
                work.wait()

    def _refresh_part(self, array: Array, part: ShardPiece, shard: ShardPiece) -> Work:
        """An array that is elsewhere comes to the device for it."""
        start, stop = shard.start - part.start, shard.stop - part.start
        if array.is_at(self._device, array.tensor.dtype):
            return all_gather_into_(array.tensor, array.tensor[start:stop], self.ranks.outer, async_op=True)
        near = torch.empty(part.stop - part.start, dtype=array.tensor.dtype, device=self._device)
        array.part(start, stop).read(near[start:stop]).wait()
        all_gather_into_(near, near[start:stop], self.ranks.outer)
        array.write(near).wait()
        return DONE

    def _make_unit(self, layer: int, first: int, stop: int, dtype: torch.dtype, device: torch.device) -> Unit:
        buckets = self.layout.buckets
        start = buckets[first].start
        if self._shared:
            unit = MappedUnit(layer, first, stop - 1, dtype, self._shared.map(first, stop), self.ranks.inner)
        else:
            flat = torch.empty(buckets[stop - 1].stop - start, dtype=dtype, device=device)
            unit = Unit(layer, first, stop - 1, flat, self.ranks.inner)
        for b in range(first, stop):
            whole = unit.flat[buckets[b].start - start:buckets[b].stop - start]
            unit.buckets.append((whole, self._arrays[b]))
        return unit

    def _adopt(self, unit: Unit, parameters: Sequence[nn.Parameter]) -> None:
        buckets = self.layout.buckets
        start = buckets[unit.first_bucket].start
        for i in range(buckets[unit.first_bucket].first_slot, buckets[unit.last_bucket].last_slot):
            slot = self.layout.slots[i]
            become(parameters[i], unit.flat[slot.start - start:slot.stop - start].view(parameters[i].shape))
        unit.free()         # from here on; views cannot be made of a storage of no bytes


@torch.no_grad()
def fill(out: torch.Tensor, parameter: nn.Parameter, start: int, draw: Draw | None) -> None:
    """Elements [start, start + len(out)) of the flattened parameter; drawn, where it is on "meta"."""
    if not parameter.is_meta:
        out.copy_(parameter.detach().reshape(-1)[start:start + out.numel()])
    else:
        assert draw is not None, f"{parameter.spec.name} is on the meta device, and nothing is given to draw its values with"
        draw(parameter.spec, start, out)


def become(parameter: nn.Parameter, view: torch.Tensor) -> None:
    """The parameter's values are `view` from now on; its version counter stays its own."""
    if not parameter.is_meta:
        parameter.data = view
        return
    real = nn.Parameter(view.data, requires_grad=parameter.requires_grad)      # .data: a version counter of its own
    real.__dict__.update(parameter.__dict__)
    torch.utils.swap_tensors(parameter, real)
