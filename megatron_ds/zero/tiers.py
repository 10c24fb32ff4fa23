"""Where training state lives between two uses: in memory, the device's or the host's, or on a disk (offloading).

A *home* makes `Array`s, flat state that can be read into a buffer and written from one. `Array.tensor` is the same state as a
tensor, to be looked at and changed by anybody who is in no hurry (to initialise, save, load): memory itself, or a map of the
file. What an update needs of a disk travels by read and write instead, past the page cache (`disk.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ..host.async_io import aligned_empty
from ..host.memory_maps import huge_page_zeros
from ..mpu.group import DONE, Work


class Array(Protocol):
    """Flat state of one dtype. While a read or a write is under way, neither buffer nor `tensor` may be touched."""

    tensor: torch.Tensor
    padded_numel: int       # elements that a buffer to read into must have

    def part(self, start: int, stop: int) -> "Array": ...
    def is_at(self, device: torch.device, dtype: torch.dtype) -> bool: ...     # `tensor` serves as it is
    def read(self, out: torch.Tensor) -> Work: ...                             # may convert
    def write(self, values: torch.Tensor) -> Work: ...


class Home(Protocol):
    """place: "device", "cpu" or "nvme". is_plain: memory of the host, and of no particular kind."""

    place: str
    is_plain: bool

    def arrays(self, sizes: Sequence[int], dtype: torch.dtype) -> list[Array]: ...      # of zeros
    def settle(self) -> None: ...       # what was written through `Array.tensor` is what `read` finds


@dataclass(frozen=True)
class InMemory:
    tensor: torch.Tensor

    @property
    def padded_numel(self) -> int:
        return self.tensor.numel()

    def part(self, start: int, stop: int) -> "InMemory":
        return InMemory(self.tensor[start:stop])

    def is_at(self, device: torch.device, dtype: torch.dtype) -> bool:
        return self.tensor.device == device and self.tensor.dtype == dtype

    def read(self, out: torch.Tensor) -> Work:
        return _copy(out, self.tensor)

    def write(self, values: torch.Tensor) -> Work:
        return _copy(self.tensor, values)


class MemoryHome:
    """Memory of `device`; on the host page-locked where there is a GPU (`pin`), so that copies run beside kernels."""

    def __init__(self, device: torch.device, place: str = "device", pin: bool = False):
        self.device, self.place, self._pin = device, place, pin
        self.is_plain = device.type == "cpu" and not pin

    def arrays(self, sizes: Sequence[int], dtype: torch.dtype) -> list[Array]:
        numel = sum(sizes)
        zeros = (torch.zeros(numel, dtype=dtype, pin_memory=True) if self._pin
                 else huge_page_zeros(numel, dtype=dtype, device=self.device))
        return [InMemory(part) for part in zeros.split(list(sizes))]

    def settle(self) -> None:
        pass


class Buffers:
    """Host memory for state on its way, by name; kept from one step to the next."""

    def __init__(self, pin: bool):
        self._pin = pin
        self._by_name: dict[str, torch.Tensor] = {}

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._by_name.values())

    def get(self, name: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A buffer of `numel` elements, of any content, at the start of a page."""
        held = self._by_name.get(name)
        if held is None or held.numel() < numel:
            held = torch.empty(numel, dtype=dtype, pin_memory=True) if self._pin else aligned_empty(numel, dtype)
            self._by_name[name] = held
        return held[:numel]


def _copy(out: torch.Tensor, values: torch.Tensor) -> Work:
    """Between host and GPU: in the order of the GPU's current stream; waiting means that the host may use both."""
    out.copy_(values, non_blocking=True)
    if out.is_cuda == values.is_cuda:
        return DONE
    event = torch.cuda.Event()
    event.record()
    return _Waiting(event)


@dataclass(frozen=True)
class _Waiting:
    event: object

    def wait(self) -> None:
        self.event.synchronize()
