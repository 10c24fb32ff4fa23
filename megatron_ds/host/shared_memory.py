"""`SharedPages`: memory of each rank that the other ranks of its group see, all on one host.

Data that do not change during a step, such as weights, need not be sent between processes of one host: a process that needs
them maps the owner's pages, without copying, sending or waiting. A mapped page counts as the process's own memory until it is
unmapped.

There is no synchronisation here: the caller ensures that no rank reads while another writes.
"""

import ctypes
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

logger = logging.getLogger(__name__)

PAGE = mmap.PAGESIZE
_NAME = "megatron_ds"
_MACHINES = ("x86_64", "aarch64")
_PROT_NONE, _MAP_FIXED, _MAP_NORESERVE, _MADV_POPULATE_READ = 0, 0x10, 0x4000, 22       # Linux's on these


@dataclass(frozen=True)
class Part:
    """Bytes [start, start + nbytes) of a rank's shared memory."""

    rank: int
    start: int
    nbytes: int


class SharedPages:
    """An anonymous file in memory for each rank, gone with the last who holds it. files: of all ranks; `rank` is this one."""

    def __init__(self, rank: int, files: Sequence[int]):
        self.files, self._rank, self._end = files, rank, 0
        weakref.finalize(self, _close, files).atexit = False

    def allocate(self, nbytes: int) -> tuple[int, torch.Tensor]:
        """(first byte, uint8 [nbytes] of zeros) in this rank's file. All ranks allocate alike, then have it at the same place.

        Raises OSError where there is no room.
        """
        start, self._end = self._end, self._end + _up_to_page(nbytes)
        os.ftruncate(self.files[self._rank], self._end)
        address = _map(None, nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE, self.files[self._rank], start)
        return start, torch.frombuffer(_memory_at(address, nbytes), dtype=torch.uint8)


class Mapping:
    """bytes: uint8, the parts of files. Valid between `populate` and `drop`; what is written to them nobody else sees.

        part 0   |-- pages --|-- pages --|- piece -|
        part 1                           |- piece -|-- pages --|-- pages --|

    A page that two parts meet in is a copy of its pieces. Raises OSError where the system has no room.
    """

    def __init__(self, shared: SharedPages, parts: Sequence[Part]):
        """Where a part ends within a page, the next one must go on there."""
        self._shared = shared                                       # its files stay open
        begin = parts[0].start % PAGE
        stop = begin + sum(part.nbytes for part in parts)
        base, size = _map(None, _up_to_page(stop), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, _PROT_NONE, -1, 0), _up_to_page(stop)
        memory = _memory_at(base, size)
        self._span, self.bytes = (base, size), torch.frombuffer(memory, dtype=torch.uint8)[begin:stop]
        self._pieces: list[tuple[memoryview, int, int]] = []        # where, file, from which byte on
        for part in parts:
            assert part.start % PAGE == begin % PAGE, "a part does not go on where the last one ended within a page"
            self._lay(memoryview(memory), base, begin, shared.files[part.rank], part)
            begin += part.nbytes

    def _lay(self, memory: memoryview, base: int, begin: int, file: int, part: Part) -> None:
        """Whole pages of a part are mapped, to byte `begin` on; pieces of pages will be read."""
        stop, first, last = begin + part.nbytes, _up_to_page(begin), (begin + part.nbytes) // PAGE * PAGE
        if first < last:
            _map(base + first, last - first, mmap.MAP_PRIVATE | _MAP_FIXED, _PROT_NONE, file, part.start + first - begin)
        for low, high in [(begin, first), (last, stop)] if first <= last else [(begin, stop)]:
            if low < high:
                self._pieces.append((memory[low:high], file, part.start + low - begin))

    def populate(self) -> None:
        _check(_libc().mprotect(*self._span, mmap.PROT_READ | mmap.PROT_WRITE), self._span[1])
        # All pages at once rather than each when it is read; the latter is what a kernel before 5.14 does.
        _libc().madvise(*self._span, _MADV_POPULATE_READ)
        for piece, file, start in self._pieces:
            count = os.preadv(file, [piece], start)
            assert count == len(piece), f"{count} of {len(piece)} bytes at {start} of a rank's shared memory"

    def drop(self) -> None:
        """Release the memory. Reading it afterwards segfaults instead of returning stale data."""
        _check(_libc().madvise(*self._span, mmap.MADV_DONTNEED), self._span[1])
        _check(_libc().mprotect(*self._span, _PROT_NONE), self._span[1])


def share_pages(rank: int, exchange: Callable[[object], list]) -> SharedPages | None:
    """Memory that all ranks see; None where they are on several hosts, or not on Linux.

    rank: the position of this one. exchange: every rank's object, in order. Collective over its ranks.
    """
    host, name = _host(), f"{_NAME}-{secrets.token_hex(8)}"
    file = None if host is None else _make_file(name)
    entries = exchange((host if file is not None else None, os.getpid(), file, name))
    hosts = {entry[0] for entry in entries}
    if None in hosts or len(hosts) > 1:
        _close([file])
        return None
    files, trouble = _open_others(entries, rank)
    told = [words for words in exchange(trouble) if words]
    if told:
        _close(files)
        if rank == 0:
            _warn_once(told[0])
        return None
    return SharedPages(rank, files)


def _host() -> tuple[str, str, str] | None:
    """Equal for two processes that know each other's ids; None where this file does not know the system."""
    try:
        if platform.machine() not in _MACHINES:
            return None
        return socket.gethostname(), Path("/proc/sys/kernel/random/boot_id").read_text(), os.readlink("/proc/self/ns/pid")
    except OSError:
        return None


def _make_file(name: str) -> int | None:
    try:
        return os.memfd_create(name)
    except (AttributeError, OSError):       # not on Linux; or the system forbids it
        return None


def _open_others(entries: Sequence[tuple], rank: int) -> tuple[list[int], str]:
    """(this rank's file and the others', as far as they could be opened; why one could not be)"""
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
                trouble = f"{path} is another file than process {pid} said"
            else:
                files.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            trouble = f"process {os.getpid()} may not see memory of process {pid}: {error}"
    return files, trouble


@functools.cache
def _warn_once(why: str) -> None:
    logger.warning("the processes of this host send sharded weights as messages, which is slower than shared memory: %s", why)


def _close(files: Sequence[int | None]) -> None:
    for file in files:
        if file is not None:
            os.close(file)


@functools.cache
def _libc() -> ctypes.CDLL:
    """The calls that Python's `mmap` does not offer at a given address."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.madvise.argtypes = libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc


def _map(address: int | None, nbytes: int, flags: int, protection: int, file: int, offset: int) -> int:
    at = _libc().mmap(address, nbytes, protection, flags | _MAP_NORESERVE, file, offset)
    _check(at == ctypes.c_void_p(-1).value, nbytes)
    return at


def _check(failed: int, nbytes: int) -> None:
    if failed:
        code = ctypes.get_errno()
        raise OSError(code, f"cannot map {nbytes} bytes of this host's memory, where the ranks of one host share the weights "
                            f"of ZeRO stage 3: {os.strerror(code)}. Check ulimit -v and -d, vm.max_map_count and "
                            "vm.overcommit_memory")


def _memory_at(address: int, nbytes: int) -> ctypes.Array:
    """A buffer there, unmapped when nobody looks at it any more."""
    memory = (ctypes.c_char * nbytes).from_address(address)
    weakref.finalize(memory, _libc().munmap, address, nbytes).atexit = False
    return memory


def _up_to_page(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE
