"""State on a disk: arrays in a scratch file. Updates read and write it past the page cache; all others look at a map."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..host.async_io import ALIGNMENT, AsyncIO, aligned_empty
from ..host.scratch_file import Region, ScratchFile
from ..mpu.group import Work
from .tiers import Array


@dataclass(frozen=True)
class OnDisk:
    region: Region
    tensor: torch.Tensor

    @property
    def padded_numel(self) -> int:
        return self.region.nbytes // self.tensor.element_size()

    def part(self, start: int, stop: int) -> "OnDisk":
        """start: on a page of the file."""
        size = self.tensor.element_size()
        last = -(-stop * size // ALIGNMENT) * ALIGNMENT
        region = Region(self.region.file, self.region.offset + start * size, last - start * size)
        return OnDisk(region, self.tensor[start:stop])

    def is_at(self, device: torch.device, dtype: torch.dtype) -> bool:
        return False

    def read(self, out: torch.Tensor) -> Work:
        if out.device.type == "cpu" and out.dtype == self.tensor.dtype:
            return self.region.read_into(out)
        buffer = aligned_empty(self.padded_numel, self.tensor.dtype)
        return _Then(self.region.read_into(buffer), lambda: out.copy_(buffer[:out.numel()]))

    def write(self, values: torch.Tensor) -> Work:
        return self.region.write_from(values)


class DiskHome:
    """A scratch file in `directory`, which holds nothing anybody could mistake for saved state, also after a crash.

    Raises ConfigError where the directory is missing or cannot be written; MegatronDSError when the disk is full.
    """

    place, is_plain = "nvme", False

    def __init__(self, directory: str, io: AsyncIO):
        self._file = ScratchFile(directory, io)
        self._regions: list[Region] = []

    def arrays(self, sizes: Sequence[int], dtype: torch.dtype) -> list[Array]:
        made = []
        for numel in sizes:
            region = self._file.allocate(-(-numel * dtype.itemsize // ALIGNMENT) * ALIGNMENT)
            self._regions.append(region)
            made.append(OnDisk(region, region.map(dtype, numel)))
        return made

    def settle(self) -> None:
        for region in self._regions:
            region.settle()


@dataclass(frozen=True)
class _Then:
    work: Work
    after: Callable[[], object]

    def wait(self) -> None:
        self.work.wait()
        self.after()
