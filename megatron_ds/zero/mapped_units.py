"""Units of ranks that share the memory of their parts."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import torch

from ..host.shared_pages import PAGE, Part
from ..host.shared_pages import Mapping as PageMapping
from ..mpu.group import Group
from .arrays import Array
from .gathering import Unit
from .layout import Bucket, Layout


class MappedUnit(Unit):
    """A unit of ranks that share the memory of their parts: whole when their pages are mapped.

    A gather is counted as usual, but copies nothing. Reading `flat` of a free unit is a segmentation fault.
    """

    def __init__(
        self,
        layer: int,
        first_bucket: int,
        last_bucket: int,
        dtype: torch.dtype,
        mapping: PageMapping,
        group: Group,
    ):
        super().__init__(
            layer, first_bucket, last_bucket, mapping.bytes.view(dtype), group
        )
        self._mapping = mapping
        self._is_there = False

    def fetch(self) -> None:
        """Does nothing: parts are in the memory of the host."""

    def start(self) -> None:
        """Only counted: the wait maps the pages."""
        if self.is_free:
            self.is_free = False
            for whole, _ in self.buckets:
                self.group.traffic.add(
                    "all_gather", self.group.axes, self.group.size, whole.nbytes
                )

    def wait(self) -> None:
        if not self.is_free and not self._is_there:
            self._mapping.populate()
            self._is_there = True

    def free(self) -> None:
        self._mapping.drop()
        self.is_free = True
        self._is_there = False


class SharedParts:
    """This rank's parts of all buckets in memory that the other ranks of the host can map.

    All ranks of the group allocate in the same way, without communication. They must synchronize (a barrier)
    between writing parts and mapping them, and between using what was mapped and writing. Raises OSError.

    arrays: this rank's part of each bucket, zeros at first
    """

    def __init__(self, layout: Layout, group: Group, dtype: torch.dtype):
        self._memory = group.shared_memory
        self._parts, nbytes = _plan_parts(layout.buckets, group.size, dtype.itemsize)
        self._start, own = self._memory.allocate(nbytes)
        mine = [parts[group.rank] for parts in self._parts]
        self.arrays = [
            Array(own[part.start : part.start + part.nbytes].view(dtype))
            for part in mine
        ]

    def map(self, first: int, stop: int) -> PageMapping:
        """Buckets [first, stop), one after the other, as in the flat buffer."""
        parts = chain.from_iterable(self._parts[first:stop])
        moved = [replace(part, start=self._start + part.start) for part in parts]
        return PageMapping(self._memory, moved)


def _plan_parts(
    buckets: Sequence[Bucket], ranks: int, itemsize: int
) -> tuple[list[list[Part]], int]:
    """(the part of each rank in each bucket, bytes of memory of a rank)"""
    planned = []
    end = 0
    for bucket in buckets:
        nbytes = (bucket.stop - bucket.start) // ranks * itemsize
        starts = [bucket.start * itemsize + rank * nbytes for rank in range(ranks)]
        planned.append(
            [
                Part(rank, end + start % PAGE, nbytes)
                for rank, start in enumerate(starts)
            ]
        )
        end += (
            nbytes // PAGE + 2
        ) * PAGE  # a part can extend into one more page on either side
    return planned, end
