"""A mesh of any size without other processes: the groups of one rank, over a transport without peers.

Collectives return at once and leave their result as it was: on the meta device, where tensors have shapes
and no values, nothing else is needed. Sizes are checked as by a real transport and calls are counted in
`mesh.traffic`, so the bytes that one of a thousand ranks sends can be counted on a laptop.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import LayoutError
from .grid import Grid
from .group import DONE, Group, Messages, Traffic, Work
from .mesh import Mesh


class FakeTransport:
    """`group.Transport` without peers. size: of the group."""

    wait_seconds = math.inf

    def __init__(self, axes: str, size: int):
        self.axes = axes
        self.size = size

    def all_reduce(self, tensor: Tensor, op: str) -> Work:
        """Leave the tensor as it is."""
        return DONE

    def all_gather(self, out: Tensor, tensor: Tensor) -> Work:
        """Leave `out` as it is. Raises LayoutError for wrong sizes."""
        self._check("all-gather", tensor.numel() * self.size, out.numel())
        return DONE

    def reduce_scatter(self, out: Tensor, tensor: Tensor, op: str) -> Work:
        """Leave `out` as it is. Raises LayoutError for wrong sizes."""
        self._check("reduce-scatter", out.numel() * self.size, tensor.numel())
        return DONE

    def all_to_all(
        self,
        out: Tensor,
        tensor: Tensor,
        sent: Sequence[int] | None = None,
        received: Sequence[int] | None = None,
    ) -> Work:
        """Leave `out` as it is. Raises LayoutError for wrong sizes, if the pieces are equal."""
        if sent is None:
            self._check("all-to-all", tensor.numel(), out.numel())
        return DONE

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        """Leave the tensor as it is."""
        return DONE

    def isend(self, tensor: Tensor, destination: int, tag: int) -> Work:
        """Send nothing."""
        return DONE

    def irecv(self, tensor: Tensor, source: int, tag: int) -> Work:
        """Leave the tensor as it is."""
        return DONE

    def exchange(self, sends: Messages, receives: Messages) -> Work:
        """Send nothing, and leave the received tensors as they are."""
        return DONE

    def all_gather_object(self, obj: Any) -> list:
        """Return the object of this rank, for each rank."""
        return [obj] * self.size

    def barrier(self) -> None:
        """Return at once."""

    def share_memory(self) -> None:
        """None: no rank shares memory."""

    def share_signals(self) -> None:
        """None, as for memory."""

    def failure(self, what: str, error: Exception) -> Exception:
        """Return the error itself."""
        return error

    def _check(self, what: str, parts: int, whole: int) -> None:
        if parts != whole:
            raise LayoutError(
                f"{what} over the {self.axes} group of {self.size}: the parts of all ranks "
                f"have {parts} elements in total, but the whole has {whole}."
            )


def fake_mesh(grid: Grid, rank: int, device: torch.device | str = "meta") -> Mesh:
    """Return the mesh of `rank`, over fake transports."""
    return Mesh(grid, rank, _connect, device)


def fake_group(
    axes: str, size: int, rank: int = 0, traffic: Traffic | None = None
) -> Group:
    """Return a group of `size` ranks numbered from 0, seen from one of them."""
    transport = FakeTransport(axes, size) if size > 1 else None
    return Group(axes, tuple(range(size)), rank, transport, traffic or Traffic())


def _connect(
    axes: str, groups: list[tuple[int, ...]], rank: int
) -> FakeTransport | None:
    mine = next(ranks for ranks in groups if rank in ranks)
    return FakeTransport(axes, len(mine)) if len(mine) > 1 else None
