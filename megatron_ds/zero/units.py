"""`Unit`: the parameters that one layer owns of a set, gathered and freed together (ZeRO 3).

Terms:  a *unit* is a run of whole buckets: what is gathered at a time. Its *flat* buffer holds the parameters
        while they are whole; they are views of it all the time. *Free* means that the flat buffer has a
        storage of no bytes, or addresses without memory; *whole*, that it is gathered.

Note: why the storage and not the tensor. Autograd, saved tensors and layers hold the parameter, or views of
it, from forward to backward. Shrinking the storage to nothing and growing it again leaves all of them valid;
their contents are undefined until the next gather. Refilling goes through `flat`, whose version counter is
not that of the parameters: to autograd, a parameter that was freed and gathered again has not changed. (It
has the same values: updates happen when no graph is alive.)

Ranks of one host can share the memory of their parts (`SharedParts`). A unit is then gathered by mapping the
pages of its parts next to each other: nothing is copied and no rank waits. A part has the same offset in a
page of its owner's memory as in the flat buffer:

    flat buffer     |---- part of rank 0 ----|---- part of rank 1 ----|
    pages           |       |       |       |       |       |       |
    rank 0's        |---- part of rank 0 ----|
    rank 1's                                |---- part of rank 1 ----|
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch

from ..host.async_io import aligned_empty
from ..host.memory_maps import PAGE, Mapping, Part
from ..mpu.collectives import all_gather_into_
from ..mpu.group import DONE, Group, Work
from .layout import Bucket, Layout
from .tiers import Array, InMemory


class GatherUnit(Protocol):
    """What `LayerGathering` gathers: a `Unit`, or a stand-in that counts (prediction.py).

    claims   layers that need it whole: it is freed when the last claim is removed
    """

    numel: int
    claims: set
    is_free: bool

    def fetch(self) -> None:
        """Begin to bring offloaded shards to the device, unless they are there or the unit is whole."""

    def start(self) -> None:
        """Begin to gather, unless it is whole or on its way. Collective."""

    def wait(self) -> None:
        """If the gather was started, the parameters are whole on return."""

    def free(self) -> None:
        """Free the flat buffer."""


class Unit:
    """A `GatherUnit` of the parameters that layer `layer` owns in a set.

    buckets  for each bucket of the unit: its view of `flat`, this rank's part of it
    nbytes   of the flat buffer, when whole
    """

    def __init__(self, layer: int, first_bucket: int, last_bucket: int, flat: torch.Tensor, group: Group):
        self.layer, self.first_bucket, self.last_bucket = layer, first_bucket, last_bucket
        self.numel = flat.numel()
        self.flat, self.nbytes, self.group = flat, flat.nbytes, group
        self.buckets: list[tuple[torch.Tensor, Array]] = []
        self.claims: set = set()
        self.is_free = False
        self._works: list[Work] = []
        self._near: list[tuple[torch.Tensor, Work]] | None = None      # shards on the device, or on their way

    def fetch(self) -> None:
        """See `GatherUnit`."""
        if self.is_free and self._near is None:
            self._near = [self._fetch(array) for _, array in self.buckets]

    def start(self) -> None:
        """See `GatherUnit`."""
        if not self.is_free:
            return
        self.fetch()
        self.flat.untyped_storage().resize_(self.nbytes)
        self.is_free = False
        for (whole, _), (shard, work) in zip(self.buckets, self._near):
            work.wait()
            self._works.append(all_gather_into_(whole, shard, self.group, async_op=True))

    def wait(self) -> None:
        """See `GatherUnit`."""
        for work in self._works:
            work.wait()
        self._works = []
        if not self.is_free:
            self._near = None       # gathered, no longer read

    def _fetch(self, array: Array) -> tuple[torch.Tensor, Work]:
        if array.is_at(self.flat.device, self.flat.dtype):
            return array.tensor, DONE
        on_cpu = self.flat.device.type == "cpu"
        make = aligned_empty if on_cpu else partial(torch.empty, device=self.flat.device)
        buffer = make(array.padded_numel, dtype=self.flat.dtype)
        return buffer[:array.tensor.numel()], array.read(buffer)

    def free(self) -> None:
        """See `GatherUnit`."""
        self.wait()
        for _, work in self._near or ():        # fetched but not gathered
            work.wait()
        self._near = None
        if not self.is_free:
            self.flat.untyped_storage().resize_(0)
            self.is_free = True


class MappedUnit(Unit):
    """A unit of ranks that share the memory of their parts: whole when their pages are mapped, one part after
    the other.

    A gather is counted as usual, but copies nothing. While the unit is free, reading `flat` is a segmentation
    fault.
    """

    def __init__(self, layer: int, first_bucket: int, last_bucket: int, dtype: torch.dtype, mapping: Mapping,
                 group: Group):
        super().__init__(layer, first_bucket, last_bucket, mapping.bytes.view(dtype), group)
        self._mapping, self._is_there = mapping, False

    def fetch(self) -> None:
        """Does nothing: parts are in the memory of the host."""

    def start(self) -> None:
        """Only counted: the wait maps the pages."""
        if self.is_free:
            self.is_free = False
            for whole, _ in self.buckets:
                self.group.traffic.add("all_gather", self.group.axes, self.group.size, whole.nbytes)

    def wait(self) -> None:
        """See `GatherUnit`."""
        if not self.is_free and not self._is_there:
            self._mapping.populate()
            self._is_there = True

    def free(self) -> None:
        """See `GatherUnit`."""
        self._mapping.drop()
        self.is_free, self._is_there = True, False


class SharedParts:
    """This rank's parts of all buckets in memory that the other ranks of the host can map.

    All ranks of the group allocate in the same way, without communication. They must synchronize (a barrier)
    between writing parts and mapping them, and between using what was mapped and writing. Raises OSError if
    there is no memory.

    arrays: this rank's part of each bucket, zeros at first
    """

    def __init__(self, layout: Layout, group: Group, dtype: torch.dtype):
        self._memory = group.memory
        self._parts, nbytes = _plan_parts(layout.buckets, group.size, dtype.itemsize)
        self._start, own = self._memory.allocate(nbytes)
        mine = [parts[group.rank] for parts in self._parts]
        self.arrays = [InMemory(own[part.start:part.start + part.nbytes].view(dtype)) for part in mine]

    def map(self, first: int, stop: int) -> Mapping:
        """Buckets [first, stop), one after the other, as in the flat buffer."""
        return Mapping(self._memory, [replace(part, start=self._start + part.start)
                                      for parts in self._parts[first:stop] for part in parts])


def _plan_parts(buckets: Sequence[Bucket], ranks: int, itemsize: int) -> tuple[list[list[Part]], int]:
    """(the part of each rank in each bucket, bytes of memory of a rank)"""
    planned, end = [], 0
    for bucket in buckets:
        nbytes = (bucket.stop - bucket.start) // ranks * itemsize
        starts = [bucket.start * itemsize + rank * nbytes for rank in range(ranks)]
        planned.append([Part(rank, end + start % PAGE, nbytes) for rank, start in enumerate(starts)])
        end += (nbytes // PAGE + 2) * PAGE              # a part can extend into one more page on either side
    return planned, end
