"""`SharedParts`: the parts of gathered weights (ZeRO 3) of all ranks of a host, in memory that each of them sees.

To gather is to map them next to each other, with nothing moved and nobody waited for. A part lies in its owner's memory as it
lies in the flat buffer, at the same place of a page:

    flat buffer     |---- part of rank 0 ----|---- part of rank 1 ----|
    pages           |       |       |       |       |       |       |
    rank 0's        |---- part of rank 0 ----|
    rank 1's                                |---- part of rank 1 ----|
"""

from collections.abc import Sequence

import torch

from ..mpu.collectives import barrier
from ..mpu.group import Group
from ..mpu.host_memory import PAGE, Mapping, Part, SharedPages
from .home import InMemory
from .layout import Bucket, Layout


class SharedParts:
    """arrays: of each bucket this rank's part."""

    def __init__(self, places: Sequence[Sequence[Part]], memory: SharedPages, dtype: torch.dtype, group: Group):
        """places: of each bucket the part of each rank."""
        self._places, self._memory, self._group = places, memory, group
        mine = [parts[group.rank] for parts in places]
        self.arrays = [InMemory(memory.own[part.start:part.start + part.nbytes].view(dtype)) for part in mine]

    def map(self, first: int, stop: int) -> Mapping:
        """Buckets [first, stop), one after the other, as in the flat buffer."""
        return self._memory.map([part for parts in self._places[first:stop] for part in parts])

    def meet(self) -> None:
        """On return all ranks see what was written before, and nobody looks any more at what was there. Collective."""
        barrier(self._group)


def share_parts(layout: Layout, group: Group, dtype: torch.dtype) -> SharedParts | None:
    """Of zeros; None where the ranks of `group` are on several hosts. Collective over it."""
    if group.transport is None:
        return None
    places, nbytes = _places(layout.buckets, group.size, dtype.itemsize)
    memory = group.transport.share_memory(nbytes)
    return None if memory is None else SharedParts(places, memory, dtype, group)


def _places(buckets: Sequence[Bucket], ranks: int, itemsize: int) -> tuple[list[list[Part]], int]:
    """(of each bucket the part of each rank, bytes of memory a rank)"""
    places, end = [], 0
    for bucket in buckets:
        nbytes = (bucket.stop - bucket.start) // ranks * itemsize
        starts = [bucket.start * itemsize + rank * nbytes for rank in range(ranks)]
        places.append([Part(rank, end + start % PAGE, nbytes) for rank, start in enumerate(starts)])
        end += (nbytes // PAGE + 2) * PAGE              # a part can reach into a page more on either side
    return places, end
