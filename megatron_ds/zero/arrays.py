"""`Tier`, a place for offloaded state, and `Array`, flat state in one."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ..host.transfers import Then
from ..mpu.group import DONE, Waitable
from ..mpu.host_reads import wait_for_mark
from .copies import begin_copy


class Tier:
    """A place for offloaded state.

    place     "device", "cpu" or "nvme"
    is_plain  True for ordinary host memory, which is neither page-locked nor a file
    """

    is_plain: bool

    def arrays(self, sizes: Sequence[int], dtype: torch.dtype) -> Sequence["Array"]:
        """Make arrays of zeros."""
        raise NotImplementedError

    def settle(self) -> None:
        """Write back what was written through `Array.tensor`, so that `read` returns it."""


@dataclass(frozen=True)
class Array:
    """Flat state of one dtype, in memory unless a subclass keeps it elsewhere. During a read or write neither
    the buffer nor `tensor` may be used."""

    tensor: torch.Tensor

    @property
    def padded_numel(self) -> int:
        """Elements that a buffer to read into must have."""
        return self.tensor.numel()

    def part(self, start: int, stop: int) -> "Array":
        """Elements [start, stop)."""
        return Array(self.tensor[start:stop])

    def is_at(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Return whether `tensor` has this device and dtype, so that no copy is needed."""
        return self.tensor.device == device and self.tensor.dtype == dtype

    def read(self, out: torch.Tensor) -> Waitable:
        """Begin to copy to a buffer, which may be of another dtype. The host waits for a buffer of its own;
        for one on a GPU the current stream waits."""
        copied = begin_copy(out, self.tensor)
        return copied if out.is_cuda else Then(DONE, partial(wait_for_mark, copied))

    def write(self, values: torch.Tensor) -> Waitable:
        """Begin to copy from a buffer; after the wait the host may use both."""
        return Then(DONE, partial(wait_for_mark, begin_copy(self.tensor, values)))
