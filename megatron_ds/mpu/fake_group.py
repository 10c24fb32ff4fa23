"""A mesh of any size without other processes: the groups of one rank, whose peers are only imagined.

Collectives come back at once and leave in their result whatever was in it: on the meta device, where tensors have shapes and
no values, that is all there is. Sizes are checked as a real transport would, and calls are counted in `mesh.traffic` as ever,
so that what a rank of a thousand sends can be counted on a laptop.
"""

import torch

from ..errors import LayoutError
from .grid import Grid
from .group import DONE, Group
from .mesh import Mesh
from .traffic import Traffic


class FakeTransport:
    """`group.Transport` to nobody. size: of the group."""

    def __init__(self, axes: str, size: int):
        self.axes, self.size = axes, size

    def all_reduce(self, tensor, op):
        return DONE

    def all_gather(self, out, tensor):
        self._check("all-gather", tensor.numel() * self.size, out.numel())
        return DONE

    def reduce_scatter(self, out, tensor, op):
        self._check("reduce-scatter", out.numel() * self.size, tensor.numel())
        return DONE

    def all_to_all(self, out, tensor):
        self._check("all-to-all", tensor.numel(), out.numel())
        return DONE

    def broadcast(self, tensor, source):
        return DONE

    def isend(self, tensor, destination, tag):
        return DONE

    def irecv(self, tensor, source, tag):
        return DONE

    def all_gather_object(self, obj):
        return [obj] * self.size

    def barrier(self):
        pass

    def share_memory(self):
        return None

    def _check(self, what: str, parts: int, whole: int) -> None:
        if parts != whole:
            raise LayoutError(f"{what} over the {self.axes} group of {self.size}: the parts of all ranks have {parts} "
                              f"elements in total, but the whole has {whole}.")


def fake_mesh(grid: Grid, rank: int, device: torch.device | str = "meta") -> Mesh:
    """The mesh of `rank`, its peers imagined."""
    return Mesh(grid, rank, _connect, device)


def fake_group(axes: str, size: int, rank: int = 0, traffic: Traffic | None = None) -> Group:
    """A group of `size` ranks numbered from 0, seen from one of them."""
    return Group(axes, tuple(range(size)), rank, FakeTransport(axes, size) if size > 1 else None, traffic or Traffic())


def _connect(axes: str, groups: list[tuple[int, ...]], rank: int) -> FakeTransport | None:
    mine = next(ranks for ranks in groups if rank in ranks)
    return FakeTransport(axes, len(mine)) if len(mine) > 1 else None
