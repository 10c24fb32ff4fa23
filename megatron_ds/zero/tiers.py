"""Offload tiers: where training state is kept between two uses, on the device, in host memory or on a disk.

A tier makes `Array`s: flat state that is read into a buffer and written from one. `Array.tensor` is the same
state as a tensor (the memory itself, or a memory map of the file), for uses that are not in a hurry:
initialization, saving, loading. What an update needs of a disk is read and written past the page cache
instead.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch

from ..config.options.parallel import ZeroConfig
from ..host.async_io import ALIGNMENT, AsyncIO, Then, aligned_empty, make_io
from ..host.memory_maps import huge_page_zeros, round_up
from ..host.page_locked import PageLockedPool, page_locked
from ..host.scratch_file import Region, ScratchFile
from ..host.side_streams import Mark, side_stream
from ..mpu.group import DONE, Waitable
from ..mpu.host_reads import wait_for_mark

DEVICE = "device"


@dataclass(frozen=True)
class OffloadSettings:
    """Where state is kept: "device", "cpu" (host memory) or "nvme" (a scratch file in a folder).

    optimizer           masters and moments
    parameters          shards of the weights (stage 3)
    ratio               share of the optimizer state that is offloaded; the device keeps and updates the rest
    sub_group_elements  of the state that is brought to the host at a time
    """

    optimizer: str = DEVICE
    parameters: str = DEVICE
    ratio: float = 1.0
    sub_group_elements: int = 4 * 2**20
    optimizer_folder: str | None = None
    parameters_folder: str | None = None
    io: str = "auto"
    io_block_bytes: int = 1 << 20
    io_queue_depth: int = 32
    io_threads: int = 4

    @classmethod
    def from_config(cls, zero: ZeroConfig) -> "OffloadSettings":
        """Read the settings from the section `zero` of the configuration."""
        place = lambda where: DEVICE if where == "none" else where
        return cls(
            place(zero.offload_optimizer),
            place(zero.offload_param),
            zero.offload_optimizer_ratio,
            zero.sub_group_size,
            zero.offload_nvme_path,
            zero.param_nvme_path,
            zero.nvme_io,
            zero.nvme_block_size,
            zero.nvme_queue_depth,
            zero.nvme_threads,
        )


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
class Tiers:
    """The opened tiers; None: the device."""

    optimizer: Tier | None = None
    parameters: Tier | None = None

    def settle(self) -> None:
        """`Tier.settle` of both."""
        for tier in {self.optimizer, self.parameters}:
            if tier is not None:
                tier.settle()


def open_tiers(settings: OffloadSettings, device: torch.device) -> Tiers:
    """Open a scratch file in each folder. Raises ConfigError if that fails."""

    @cache  # the same place is opened once
    def tier(place: str, folder: str | None) -> Tier | None:
        if place == DEVICE:
            return None
        if place == "cpu":
            return MemoryTier(torch.device("cpu"), page_locked=device.type == "cuda")
        assert folder is not None, "the rules demand a folder for nvme"
        return DiskTier(
            folder,
            make_io(
                settings.io,
                block_bytes=settings.io_block_bytes,
                queue_depth=settings.io_queue_depth,
                threads=settings.io_threads,
            ),
        )

    return Tiers(
        tier(settings.optimizer, settings.optimizer_folder),
        tier(settings.parameters, settings.parameters_folder),
    )


# ---------------------------------------------------------------------------------------------------- memory
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
        copied = _copy(out, self.tensor)
        return copied if out.is_cuda else Then(DONE, partial(wait_for_mark, copied))

    def write(self, values: torch.Tensor) -> Waitable:
        """Begin to copy from a buffer; after the wait the host may use both."""
        return Then(DONE, partial(wait_for_mark, _copy(self.tensor, values)))


class MemoryTier(Tier):
    """Memory of `device`. page_locked: host memory from which copies to a GPU overlap with kernels."""

    def __init__(self, device: torch.device, page_locked: bool = False):
        self.device = device
        self._page_locked = page_locked
        self.is_plain = device.type == "cpu" and not page_locked

    def arrays(self, sizes: Sequence[int], dtype: torch.dtype) -> Sequence[Array]:
        numel = sum(sizes)
        zeros = (
            page_locked(numel, dtype)
            if self._page_locked
            else huge_page_zeros(numel, dtype=dtype, device=self.device)
        )
        return [Array(part) for part in zeros.split(list(sizes))]


class Buffers:
    """Host memory for state in transit, by name; kept from one step to the next."""

    def __init__(self, page_locked: bool):
        self._page_locked = page_locked
        self._by_name: dict[str, torch.Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.nbytes for buffer in self._by_name.values())

    def get(self, name: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a buffer of `numel` elements with undefined contents, at the start of a page."""
        held = self._by_name.get(name)
        if held is None or held.numel() < numel:
            held = self._by_name[name] = _host_memory(numel, dtype, self._page_locked)
        return held[:numel]


def _host_memory(numel: int, dtype: torch.dtype, is_locked: bool) -> torch.Tensor:
    """Memory with undefined contents, at the start of a page."""
    return page_locked(numel, dtype) if is_locked else aligned_empty(numel, dtype)


def copy_each(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy the second tensor of each pair to the first. The host waits once for those between devices."""
    near = []
    marks = {}  # of the last copy in each direction
    for out, values in pairs:
        if out.device == values.device:
            near.append((out, values))
        else:
            marks[out.is_cuda] = _copy(out, values)
    if near:
        outs, sources = zip(*near)
        torch._foreach_copy_(outs, sources)
    for mark in marks.values():
        wait_for_mark(mark)


def _copy(out: torch.Tensor, values: torch.Tensor) -> Mark:
    """Between host and GPU on a stream for copies in this direction, after what the current stream has."""
    if out.is_cuda == values.is_cuda:
        out.copy_(values, non_blocking=True)
        return Mark()
    stream = (
        side_stream(out.device, "to device")
        if out.is_cuda
        else side_stream(values.device, "to host")
    )
    with stream.behind_current():
        out.copy_(values, non_blocking=True)
    return stream.mark()


# ---------------------------------------------------------------------------------------------------- disk
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
            lambda: _copy(out, buffer[: out.numel()]).wait(),
        )

    def _read_to_device(self, out: torch.Tensor) -> Waitable:
        buffer, is_copied = self.pool.borrow(self.region.nbytes)
        wait_for_mark(is_copied)  # the disk writes to it without a stream

        def copy() -> None:
            mark = _copy(out, buffer.view(self.tensor.dtype)[: out.numel()])
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
