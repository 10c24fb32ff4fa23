"""The offload tier on a disk: `DiskTier`."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..host.async_io import ALIGNMENT, AsyncIO, make_io
from ..host.large_pages import aligned_empty, round_up
from ..host.page_locked import PageLockedPool
from ..host.scratch_file import Region, ScratchFile
from ..host.transfers import Then
from ..mpu.group import Waitable
from ..mpu.host_reads import wait_for_mark
from .arrays import Array, Tier
from .copies import begin_copy
from .offload_settings import OffloadSettings


@dataclass(frozen=True)
class OnDisk(Array):
    """An array in a scratch file; `tensor` is a memory map of it.

    pool: page-locked buffers, through which a GPU reads
    """

    region: Region
    pool: PageLockedPool

    @property
    def padded_numel(self) -> int:
        return self.region.nbytes // self.tensor.element_size()

    def part(self, start: int, stop: int) -> "OnDisk":
        """Return the elements [start, stop). `start` must be at a page boundary of the file."""
        size = self.tensor.element_size()
        nbytes = round_up(stop * size, ALIGNMENT) - start * size
        region = Region(self.region.file, self.region.offset + start * size, nbytes)
        return OnDisk(self.tensor[start:stop], region, self.pool)

    def is_at(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Never: a map would read through the page cache."""
        return False

    def read(self, out: torch.Tensor) -> Waitable:
        """Read directly into host memory of the same dtype; otherwise through a buffer in host memory."""
        dtype = self.tensor.dtype
        if out.is_cuda:
            return self._read_to_device(out)
        if out.dtype == dtype:
            return self.region.read_into(out)
        buffer = aligned_empty(self.padded_numel, dtype)
        return Then(
            self.region.read_into(buffer),
            lambda: begin_copy(out, buffer[: out.numel()]).wait(),
        )

    def _read_to_device(self, out: torch.Tensor) -> Waitable:
        buffer, is_copied = self.pool.borrow(self.region.nbytes)
        wait_for_mark(is_copied)  # the disk writes to it without a stream

        def copy() -> None:
            mark = begin_copy(out, buffer.view(self.tensor.dtype)[: out.numel()])
            mark.wait()
            self.pool.give(buffer, mark)

        return Then(self.region.read_into(buffer), copy)

    def write(self, values: torch.Tensor) -> Waitable:
        return self.region.write_from(values)


class DiskTier(Tier):
    """A scratch file in `directory`, without a name: a crash leaves none that looks like saved state.

    Raises ConfigError if the directory is missing or not writable, MegatronDSError if the disk is full.
    """

    is_plain = False

    def __init__(self, directory: str, io: AsyncIO):
        self._file = ScratchFile(directory, io)
        self._regions: list[Region] = []
        self._pool = PageLockedPool()

    def arrays(self, sizes: Sequence[int], dtype: torch.dtype) -> Sequence[Array]:
        made = []
        for numel in sizes:
            region = self._file.allocate(round_up(numel * dtype.itemsize, ALIGNMENT))
            self._regions.append(region)
            made.append(OnDisk(region.map(dtype, numel), region, self._pool))
        return made

    def settle(self) -> None:
        for region in self._regions:
            region.settle()


def open_disk(folder: str, settings: OffloadSettings) -> DiskTier:
    """Return the tier of a scratch file in a folder. Raises ConfigError if that fails."""
    io = make_io(
        settings.io,
        block_bytes=settings.io_block_bytes,
        queue_depth=settings.io_queue_depth,
        threads=settings.io_threads,
    )
    return DiskTier(folder, io)
