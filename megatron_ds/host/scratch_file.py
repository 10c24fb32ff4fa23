"""Scratch files: reserved disk space for state that does not fit in memory, freed when the process ends.

A `ScratchFile` has no name, so a crash leaves nothing that could be mistaken for saved state. It has two
descriptors:

    direct     O_DIRECT, between the disk and the tensor without a copy or page cache: whole pages only
    buffered   through the page cache: any address and length, memory maps; everything, if O_DIRECT fails

Note: two ways to one byte. The kernel keeps both ways coherent if one access ends before the other begins:
direct reads see what was written through the cache or a map, and direct writes drop cached pages. It does so
by units of the page cache, *folios* of up to 2048 pages, and guarantees nothing for a folio that is accessed
through a map while part of it is written directly: old bytes may be read with it and be written later over
the new ones. So regions begin at multiples of that size, and no folio spans two of them; the gaps are holes,
which use no disk space. Within one region the caller must wait for a transfer before starting the next one
and before touching the map. `Region` also drops its cached pages itself, for file systems that guarantee
less.

    region 0            region 1       region 2            begin at multiples of STRIDE
    |=======|...........|===|..........|=============|     === reserved, whole pages    ... hole
"""

import errno
import functools
import logging
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from ..errors import ConfigError, StorageError
from .async_io import ALIGNMENT, AsyncIO, bytes_of
from .large_pages import aligned_empty, round_up
from .memory_maps import FileMap
from .transfers import Transfer

logger = logging.getLogger(__name__)

STRIDE = 2048 * mmap.PAGESIZE  # the largest folio: see "two ways to one byte"


class ScratchFile:
    """A file without a name in `directory`, whose regions are reached through the engine `io`.

    direct: use O_DIRECT where the file system allows it, else log the reason. The caller closes `io`, after
    this file. The directory is made if it is missing. Raises ConfigError where it cannot be written to.
    """

    def __init__(
        self, directory: str | os.PathLike, io: AsyncIO, *, direct: bool = True
    ):
        self.directory = Path(directory)
        self.io = io
        self.buffered_fd = _open_nameless(self.directory)
        self.direct_fd = (
            _reopen_direct(self.buffered_fd, self.directory) if direct else None
        )
        self._end = 0
        fds = [fd for fd in (self.buffered_fd, self.direct_fd) if fd is not None]
        self._close = weakref.finalize(self, _close_all, fds)

    def allocate(self, nbytes: int) -> "Region":
        """Reserve disk space, so that later writes cannot find the disk full.

        Copy-on-write file systems, such as btrfs and ZFS, do not guarantee this. Raises ConfigError with the
        free space when there is not enough.
        """
        offset = round_up(self._end, STRIDE)
        length = round_up(nbytes, ALIGNMENT)
        if length:
            self._reserve(offset, length)
            self._end = offset + length
        return Region(self, offset, nbytes)

    def close(self) -> None:
        """Free the disk space, after all transfers. Maps stay valid, and keep it, while their tensors live."""
        self._close()

    def _reserve(self, offset: int, length: int) -> None:
        try:
            os.posix_fallocate(self.buffered_fd, offset, length)
        except OSError as error:
            # The system may have reserved a part of it.
            os.ftruncate(self.buffered_fd, self._end)
            status = os.statvfs(self.buffered_fd)
            raise ConfigError(
                f"{self.directory} has not enough space for {_size(length)} of offloaded state "
                f"({error.strerror}): {_size(status.f_bavail * status.f_frsize)} are free, "
                f"{_size(self._end)} were reserved before. Free disk space, give a directory "
                "on a larger disk, or offload less."
            ) from error


class Region:
    """`nbytes` of a scratch file. One transfer at a time on the same bytes; regions overlap."""

    def __init__(self, file: ScratchFile, offset: int, nbytes: int):
        self.file = file
        self.offset = offset
        self.nbytes = nbytes
        self._length = round_up(nbytes, ALIGNMENT)
        self._map: FileMap | None = None

    def read_into(self, tensor: torch.Tensor) -> Transfer:
        """Fill a contiguous CPU tensor of at most `nbytes` from the region's start.

        Direct when the tensor begins at a multiple of 4096 (`aligned_empty`). `wait` of a region's transfer
        raises StorageError. Raises ValueError for a tensor that does not fit.
        """
        view = self._checked(tensor)
        direct_fd = self._direct_fd(view)
        if direct_fd is None:
            if self.file.direct_fd is not None:
                self._drop_cached()
            return _RegionWork(
                self, [self.file.io.read(self.file.buffered_fd, view, self.offset)]
            )
        self.settle()
        body, tail = _cut(view)
        work = _RegionWork(self, [self.file.io.read(direct_fd, body, self.offset)])
        if len(tail):
            page = aligned_empty(ALIGNMENT, torch.uint8)
            work.parts.append(
                self.file.io.read(direct_fd, page, self.offset + len(body))
            )
            work.afterwards = lambda: tail.copy_(page[: len(tail)])
        return work

    def write_from(self, tensor: torch.Tensor) -> Transfer:
        """Write a contiguous CPU tensor to the region's start; later bytes of the region stay as they are.

        Direct when the tensor begins at a multiple of 4096 and ends at one or with the region.
        """
        view = self._checked(tensor)
        # Direct transfers need whole pages, so others go through the page cache.
        direct_fd = self._direct_fd(view)
        ends_within_page = len(view) % ALIGNMENT and len(view) != self.nbytes
        if direct_fd is None or ends_within_page:
            work = _RegionWork(
                self, [self.file.io.write(self.file.buffered_fd, view, self.offset)]
            )
            if self.file.direct_fd is not None:
                work.afterwards = self._write_cached
            return work
        # The whole pages are written as they are, and the rest in a page with padding.
        self.settle()
        body, tail = _cut(view)
        work = _RegionWork(self, [self.file.io.write(direct_fd, body, self.offset)])
        if len(tail):
            # Beyond the tail there is padding up to the next page.
            page = aligned_empty(ALIGNMENT, torch.uint8)
            page[: len(tail)] = tail
            work.parts.append(
                self.file.io.write(direct_fd, page, self.offset + len(body))
            )
        if self._map is not None:
            work.afterwards = self._drop_cached
        return work

    def map(self, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """Return [numel], the region as memory: read on access, written by the system at any time or by `settle`.

        Valid while the tensor lives, even when file and region are gone. Further maps show the same bytes.
        Raises StorageError where the system allows no more maps.
        """
        if numel * dtype.itemsize > self.nbytes:
            raise ValueError(
                f"{numel} elements of {dtype} do not fit in a region of {self.nbytes} bytes."
            )
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        if self._map is None:
            try:
                self._map = FileMap(self.file.buffered_fd, self.offset, self._length)
            except OSError as error:
                raise self._failure(
                    f"mapping it into memory failed: {error.strerror}"
                ) from error
        return self._map.tensor(dtype, numel)

    def settle(self) -> None:
        """Write changes of the map to the disk and free the memory of its pages; the map stays usable.

        Raises StorageError. Nothing to do without a map.
        """
        if self._map is None:
            return
        try:
            self._map.flush()
        except OSError as error:
            raise self._failure(
                f"writing back a map failed: {error.strerror}"
            ) from error
        self._drop_cached()

    def _checked(self, tensor: torch.Tensor) -> torch.Tensor:
        view = bytes_of(tensor)
        if len(view) > self.nbytes:
            raise ValueError(
                f"A tensor of {len(view)} bytes does not fit in a region of {self.nbytes}."
            )
        return view

    def _direct_fd(self, view: torch.Tensor) -> int | None:
        """Return the descriptor for direct access; None where the memory or the disk does not allow it."""
        return None if view.data_ptr() % ALIGNMENT else self.file.direct_fd

    def _write_cached(self) -> None:
        """Write to the disk what a write has left in the page cache, so that it is as durable as a direct write."""
        os.fdatasync(self.file.buffered_fd)
        self._drop_cached()

    def _drop_cached(self) -> None:
        """Drop pages from memory that are on the disk: first from the map, then from the page cache."""
        if self._map is not None:
            self._map.drop()
        os.posix_fadvise(
            self.file.buffered_fd, self.offset, self._length, os.POSIX_FADV_DONTNEED
        )

    def _failure(self, what: str) -> StorageError:
        return StorageError(
            f"Offloaded state in {self.file.directory}, {self.nbytes} bytes from offset "
            f"{self.offset} of its scratch file: {what}. It cannot go on; check the disk, "
            "and resume from a checkpoint."
        )


class _RegionWork:
    """Transfers of one region, and an action after them."""

    def __init__(self, region: Region, parts: list[Transfer]):
        self.region = region
        self.parts = parts
        self.afterwards: Callable[[], object] = _nothing

    def wait(self) -> None:
        failed = None
        while self.parts:
            try:
                self.parts.pop().wait()
            except OSError as error:
                failed = error
        try:
            if failed:
                raise failed
            self.afterwards()
            self.afterwards = _nothing
        except OSError as error:
            raise self.region._failure(error.strerror or str(error)) from error


def _nothing() -> None:
    """Do nothing, after the transfers of a region."""


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def _open_nameless(directory: Path) -> int:
    if not hasattr(os, "posix_fallocate"):
        raise ConfigError(
            "State can be offloaded to a disk on Linux only: this system cannot reserve disk "
            "space."
        )
    with suppress(OSError):  # the next lines raise
        directory.mkdir(parents=True, exist_ok=True)
    try:
        # O_EXCL: the file can never get a name.
        return os.open(directory, os.O_RDWR | os.O_TMPFILE | os.O_EXCL, 0o600)
    except OSError:
        pass  # the file system may not support it; a folder that takes no file fails below
    try:
        fd, name = tempfile.mkstemp(prefix=".megatron_ds-scratch-", dir=directory)
        os.unlink(name)
        return fd
    except OSError as error:
        raise ConfigError(
            f"{directory} cannot hold offloaded state: {error.strerror}. Give a "
            "directory that this process may write to, preferably on a local NVMe "
            "disk."
        ) from error


def _reopen_direct(fd: int, directory: Path) -> int | None:
    """Return a second, direct descriptor of the file, which is empty; None, with one line in the log, if it fails."""
    direct = None
    try:
        direct = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_DIRECT)
        page = aligned_empty(ALIGNMENT, torch.uint8).numpy().data
        if (
            os.pwritev(direct, [page], 0) + os.preadv(direct, [page], 0)
            != 2 * ALIGNMENT
        ):
            raise OSError(errno.EIO, "a page was not transferred whole")
        return direct
    except (
        OSError
    ) as error:  # some file systems accept the flag, and fail when it is used
        if direct is not None:
            os.close(direct)
        _log_buffered(directory, error.strerror)
        return None
    finally:
        os.ftruncate(fd, 0)


@functools.cache
def _log_buffered(directory: Path, reason: str) -> None:
    logger.warning(
        "Offloaded state in %s goes through the page cache, which costs memory and time: its file "
        "system has no direct access (%s).",
        directory,
        reason,
    )


def _cut(view: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Divide a view into whole pages and the rest."""
    body = len(view) // ALIGNMENT * ALIGNMENT
    return view[:body], view[body:]


def _size(nbytes: int) -> str:
    return f"{nbytes:,} bytes ({nbytes / 2**30:.2f} GiB)"
