"""`SharedParts`: the parts of gathered weights (ZeRO 3) of all ranks of a host, in memory that each of them sees.

To gather is to map them next to each other, with nothing moved and nobody waited for. A part lies in its owner's memory as it
lies in the flat buffer, at the same place of a page:

    flat buffer     |---- part of rank 0 ----|---- part of rank 1 ----|
    pages           |       |       |       |       |       |       |
    rank 0's        |---- part of rank 0 ----|
    rank 1's                                |---- part of rank 1 ----|
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from ..host.shared_memory import PAGE, Mapping, Part
from ..mpu.group import Group
from .layout import Bucket, Layout
from .tiers import InMemory


class SharedParts:
    """arrays: of each bucket this rank's part, of zeros. All ranks of the group make theirs alike, without a word.

    They must meet (a barrier) between writing to parts and mapping them, and between using what was mapped and writing.
    Raises OSError where there is no room.
    """

    def __init__(self, layout: Layout, group: Group, dtype: torch.dtype):
        self._memory = group.memory
        self._places, nbytes = _places(layout.buckets, group.size, dtype.itemsize)
        self._start, own = self._memory.allocate(nbytes)
        mine = [parts[group.rank] for parts in self._places]
        self.arrays = [InMemory(own[part.start:part.start + part.nbytes].view(dtype)) for part in mine]

    def map(self, first: int, stop: int) -> Mapping:
        """Buckets [first, stop), one after the other, as in the flat buffer."""
        return Mapping(self._memory, [replace(part, start=self._start + part.start)
                                      for parts in self._places[first:stop] for part in parts])


def _places(buckets: Sequence[Bucket], ranks: int, itemsize: int) -> tuple[list[list[Part]], int]:
    """(of each bucket the part of each rank, bytes of memory a rank)"""
    places, end = [], 0
    for bucket in buckets:
        nbytes = (bucket.stop - bucket.start) // ranks * itemsize
        starts = [bucket.start * itemsize + rank * nbytes for rank in range(ranks)]
        places.append([Part(rank, end + start % PAGE, nbytes) for rank, start in enumerate(starts)])
        end += (nbytes // PAGE + 2) * PAGE              # a part can reach into a page more on either side
    return places, end
