"""Memory of one rank that the other ranks of its group can map, all on one host: `SharedPages`, and `Mapping`,
parts of several ranks as one tensor.

Data that does not change during a step, such as weights, need not be sent between processes of one host: a
process maps the owner's `SharedPages`, without copying, sending or waiting. A mapped page counts as the
process's own memory until it is unmapped. There is no synchronisation: the caller ensures that no rank reads
while another writes.
"""

import functools
import logging
import mmap
import os
import platform
import secrets
import socket
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from .large_pages import round_up
from .memory_maps import MAP_FAILED, libc, memory_at, os_error

logger = logging.getLogger(__name__)
PAGE = mmap.PAGESIZE
_NAME = "megatron_ds"
_MACHINES = ("x86_64", "aarch64")
# Linux's on these
_PROT_NONE = 0
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MADV_POPULATE_READ = 22


@dataclass(frozen=True)
class Part:
    """Bytes [start, start + nbytes) of a rank's shared memory."""

    rank: int
    start: int
    nbytes: int


class SharedPages:
    """An anonymous file in memory for each rank, deleted with its last descriptor.

    files: descriptors of all ranks' files, in rank order; `rank` is this one.
    """

    def __init__(self, rank: int, files: Sequence[int]):
        self.files = files
        self._rank = rank
        self._end = 0
        self._own: dict[
            int, tuple[int, int]
        ] = {}  # mapped: address → (bytes, first byte)
        self._views: dict[
            tuple[int, int], torch.Tensor
        ] = {}  # (rank, first byte) → its bytes
        weakref.finalize(self, _close, files).atexit = False

    def allocate(self, nbytes: int) -> tuple[int, torch.Tensor]:
        """Return (first byte, uint8 [nbytes] of zeros) in this rank's file. Raises OSError where there is no room.

        Ranks that make the same calls get the same first bytes.
        """
        start = self._end
        self._end = self._end + round_up(nbytes, PAGE)
        os.ftruncate(self.files[self._rank], self._end)
        access = mmap.PROT_READ | mmap.PROT_WRITE
        address = _map(
            None, nbytes, mmap.MAP_SHARED, access, self.files[self._rank], start
        )
        memory = memory_at(address, nbytes)
        self._own[address] = nbytes, start
        weakref.finalize(memory, self._own.pop, address, None).atexit = False
        return start, torch.frombuffer(memory, dtype=torch.uint8)

    def zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return torch.zeros(numel) in this rank's file. Raises OSError where there is no room."""
        return self.allocate(numel * dtype.itemsize)[1].view(dtype)

    def start_of(self, tensor: torch.Tensor) -> int | None:
        """Return the first byte of a tensor in this rank's file; None if it is elsewhere."""
        at = tensor.data_ptr()
        return next(
            (
                start + at - address
                for address, (nbytes, start) in [*self._own.items()]
                if address <= at < address + nbytes
            ),
            None,
        )

    def view(self, rank: int, start: int, nbytes: int) -> torch.Tensor:
        """Return uint8 [nbytes], bytes of a rank's file from `start` on, for reading only. Raises OSError.

        Pages that were read count as the process's own memory until `drop`.
        """
        view = self._views.get((rank, start))
        if view is None or view.numel() < nbytes:
            inside = start % PAGE
            address = _map(
                None,
                inside + nbytes,
                mmap.MAP_SHARED,
                mmap.PROT_READ,
                self.files[rank],
                start - inside,
            )
            memory = memory_at(address, inside + nbytes)
            view = self._views[rank, start] = torch.frombuffer(
                memory, dtype=torch.uint8
            )[inside:]
        return view[:nbytes]

    def drop(self, rank: int, start: int) -> None:
        """Release the pages of a view; the view stays valid. Raises OSError."""
        view = self._views[rank, start]
        inside = int(view.storage_offset())
        length = inside + view.numel()
        address = view.data_ptr() - inside
        _check(libc().madvise(address, length, mmap.MADV_DONTNEED), length)


class Mapping:
    """Parts of the ranks' files as one tensor, `bytes`, uint8; valid between `populate` and `drop`.

        part 0   |-- pages --|-- pages --|- piece -|
        part 1                           |- piece -|-- pages --|-- pages --|

    Pieces of pages are copied. Writes stay private. Raises OSError where the system has no room.
    """

    def __init__(self, shared: SharedPages, parts: Sequence[Part]):
        """A part must begin at the offset within a page at which the previous one ends."""
        self._shared = shared  # its files stay open
        begin = parts[0].start % PAGE
        stop = begin + sum(part.nbytes for part in parts)
        size = round_up(stop, PAGE)
        base = _map(
            None, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, _PROT_NONE, -1, 0
        )
        memory = memory_at(base, size)
        self._span = (base, size)
        self.bytes = torch.frombuffer(memory, dtype=torch.uint8)[begin:stop]
        self._pieces: list[
            tuple[memoryview, int, int]
        ] = []  # (address, file, first byte in it)
        for part in parts:
            assert part.start % PAGE == begin % PAGE, (
                "a part begins at another offset within a page"
            )
            self._map_part(
                memoryview(memory), base, begin, shared.files[part.rank], part
            )
            begin += part.nbytes

    def _map_part(
        self, memory: memoryview, base: int, begin: int, file: int, part: Part
    ) -> None:
        """Map the whole pages of a part from byte `begin` on; note the pieces of pages, to be read."""
        stop = begin + part.nbytes
        first = round_up(begin, PAGE)
        last = (begin + part.nbytes) // PAGE * PAGE
        if first < last:
            _map(
                base + first,
                last - first,
                mmap.MAP_PRIVATE | _MAP_FIXED,
                _PROT_NONE,
                file,
                part.start + first - begin,
            )
        for low, high in (
            [(begin, first), (last, stop)] if first <= last else [(begin, stop)]
        ):
            if low < high:
                self._pieces.append((memory[low:high], file, part.start + low - begin))

    def populate(self) -> None:
        """Make `bytes` readable, with the contents that the owners have written so far. Raises OSError."""
        _check(
            libc().mprotect(*self._span, mmap.PROT_READ | mmap.PROT_WRITE),
            self._span[1],
        )
        # Map all pages at once. A kernel before 5.14 refuses, and then maps each page when it is read.
        libc().madvise(*self._span, _MADV_POPULATE_READ)
        for piece, file, start in self._pieces:
            count = os.preadv(file, [piece], start)
            assert count == len(piece), (
                f"{count} of {len(piece)} bytes at {start} of a rank's shared memory"
            )

    def drop(self) -> None:
        """Release the memory. Reading it afterwards segfaults instead of returning stale data."""
        _check(libc().madvise(*self._span, mmap.MADV_DONTNEED), self._span[1])
        _check(libc().mprotect(*self._span, _PROT_NONE), self._span[1])


def share_pages(rank: int, exchange: Callable[[object], list]) -> SharedPages | None:
    """Return memory that all ranks can map; None if they are on several hosts, or not on Linux.

    rank: the position of this one. exchange: an all-gather of objects. Collective over its ranks.
    """
    host = _host()
    name = f"{_NAME}-{secrets.token_hex(8)}"
    file = None if host is None else _make_file(name)
    entries = exchange((host if file is not None else None, os.getpid(), file, name))
    hosts = {entry[0] for entry in entries}
    if None in hosts or len(hosts) > 1:
        _close([file])
        return None
    files, trouble = _open_others(entries, rank)
    problems = [problem for problem in exchange(trouble) if problem]
    if problems:
        _close(files)
        if rank == 0:
            warn_of_messages(problems[0])
        return None
    return SharedPages(rank, files)


def _host() -> tuple[str, str, str] | None:
    """Return a value that is equal for two processes if each sees the process id of the other; None where this
    does not work."""
    try:
        if platform.machine() not in _MACHINES:
            return None
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        return socket.gethostname(), boot, os.readlink("/proc/self/ns/pid")
    except OSError:
        return None


def _make_file(name: str) -> int | None:
    try:
        return os.memfd_create(name)
    except (AttributeError, OSError):  # the system is not Linux, or forbids it
        return None


def _open_others(entries: Sequence[tuple], rank: int) -> tuple[list[int], str]:
    """Return (descriptors of all ranks' files, up to the first that cannot be opened; the reason, or "")"""
    files: list[int] = []
    trouble = ""
    for position, (_, pid, file, name) in enumerate(entries):
        path = f"/proc/{pid}/fd/{file}"
        try:
            if position == rank:
                files.append(file)
            elif trouble:
                continue
            elif os.readlink(path) != f"/memfd:{name} (deleted)":
                trouble = f"{path} is not the file that process {pid} announced"
            else:
                files.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            trouble = (
                f"process {os.getpid()} may not read memory of process {pid}: {error}"
            )
    return files, trouble


@functools.cache
def warn_of_messages(why: str) -> None:
    """Log, once for each reason, that the ranks of a group do not use shared memory. Called on one of them."""
    logger.warning(
        "the processes of this host send tensors as messages, which is slower than shared memory: "
        "%s",
        why,
    )


def _close(files: Sequence[int | None]) -> None:
    for file in files:
        if file is not None:
            os.close(file)


def _map(
    address: int | None,
    nbytes: int,
    flags: int,
    protection: int,
    file: int,
    offset: int,
) -> int:
    at = libc().mmap(address, nbytes, protection, flags | _MAP_NORESERVE, file, offset)
    _check(at == MAP_FAILED, nbytes)
    return at


def _check(failed: int, nbytes: int) -> None:
    if failed:
        error = os_error()
        raise OSError(
            error.errno,
            f"cannot map {nbytes} bytes of this host's memory, where the ranks of one "
            f"host share tensors: {error.strerror}. Check ulimit "
            "-v and -d, vm.max_map_count and vm.overcommit_memory",
        )
