"""`SharedPages`: memory of each rank that the other ranks of its group see, all on one host.

What lies still for a whole step, as weights do, need not travel between processes of one host: whoever needs it maps the
owner's pages. Nobody copies, sends or waits. A page that is mapped counts as a process's own memory until it is let go of.

Whoever writes must know that nobody reads, and whoever reads that all was written: that is the caller's to arrange.
"""

import ctypes
import functools
import logging
import mmap
import os
import socket
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

PAGE = mmap.PAGESIZE
_NAME = "megatron_ds"
_PROT_NONE, _MAP_FIXED, _MAP_NORESERVE, _MADV_POPULATE_READ = 0, 0x10, 0x4000, 22         # Linux's, on all processors


@dataclass(frozen=True)
class Part:
    """Bytes [start, start + nbytes) of a rank's shared memory."""

    rank: int
    start: int
    nbytes: int


class SharedPages:
    """own: this rank's, uint8 [nbytes], zeros at first: an anonymous file in memory, gone with the last who holds it.

    files: of all ranks, in order
    """

    def __init__(self, own: torch.Tensor, files: list[int]):
        self.own, self._files = own, files

    def map(self, parts: Sequence[Part]) -> "Mapping":
        """These parts, one after the other without gaps. Where a part ends within a page, the next one must go on there."""
        return Mapping(parts, self._files)

    def __del__(self):
        _close(self._files)


class Mapping:
    """bytes: uint8, the parts of files. Valid between `populate` and `drop`; what is written to them nobody else sees.

        part 0   |-- pages --|-- pages --|- piece -|
        part 1                           |- piece -|-- pages --|-- pages --|

    A page that two parts meet in is a copy of its pieces. Raises OSError where the system has no room.
    """

    def __init__(self, parts: Sequence[Part], files: Sequence[int]):
        begin = parts[0].start % PAGE
        stop = begin + sum(part.nbytes for part in parts)
        size = _up_to_page(stop)
        base = _map(None, size, mmap.MAP_ANONYMOUS, -1, 0)
        memory = (ctypes.c_char * size).from_address(base)
        weakref.finalize(memory, _libc().munmap, base, size).atexit = False         # when no tensor looks at it any more
        self._span, self.bytes = (base, size), torch.frombuffer(memory, dtype=torch.uint8)[begin:stop]
        self._pieces: list[tuple[memoryview, int, int]] = []        # where, file, from which byte on
        for part in parts:
            assert part.start % PAGE == begin % PAGE, "a part does not go on where the last one ended within a page"
            self._lay(memoryview(memory), base, begin, files[part.rank], part)
            begin += part.nbytes

    def _lay(self, memory: memoryview, base: int, begin: int, file: int, part: Part) -> None:
        """Whole pages of a part are mapped, to byte `begin` on; pieces of pages will be read."""
        stop, first, last = begin + part.nbytes, _up_to_page(begin), (begin + part.nbytes) // PAGE * PAGE
        if first < last:
            _map(base + first, last - first, _MAP_FIXED, file, part.start + first - begin)
        for low, high in [(begin, first), (last, stop)] if first <= last else [(begin, stop)]:
            if low < high:
                self._pieces.append((memory[low:high], file, part.start + low - begin))

    def populate(self) -> None:
        _libc().mprotect(*self._span, mmap.PROT_READ | mmap.PROT_WRITE)
        # All pages at once rather than each when it is read; the latter is what a kernel before 5.14 does.
        _libc().madvise(*self._span, _MADV_POPULATE_READ)
        for piece, file, start in self._pieces:
            count = os.preadv(file, [piece], start)
            assert count == len(piece), f"{count} of {len(piece)} bytes at {start} of a rank's shared memory"

    def drop(self) -> None:
        """Let go of the memory. Who reads it nevertheless is ended, as with memory that was freed, rather than misled."""
        _libc().madvise(*self._span, mmap.MADV_DONTNEED)
        _libc().mprotect(*self._span, _PROT_NONE)


def share_pages(nbytes: int, rank: int, exchange: Callable[[object], list]) -> SharedPages | None:
    """`nbytes` of each rank that all ranks see; None where they are on several hosts, or not on Linux.

    rank: the position of this one. exchange: every rank's object, in order. Collective over its ranks.
    """
    host, file = _host(), _make_file(nbytes)
    entries = exchange((host if file is not None else None, os.getpid(), file))
    hosts = {entry[0] for entry in entries}
    if None in hosts or len(hosts) > 1:
        _close([file])
        return None
    files, trouble = _open_all(entries, nbytes)
    told = [words for words in exchange(trouble) if words]
    own = torch.frombuffer(mmap.mmap(file, nbytes), dtype=torch.uint8) if not told else None
    _close([file])
    if told:
        _close(files)
        if rank == 0:
            _warn_once(told[0])
        return None
    return SharedPages(own, files)


def _host() -> tuple[str, str, str] | None:
    """Equal for two processes that know each other's ids; None where there are no such files."""
    try:
        return socket.gethostname(), Path("/proc/sys/kernel/random/boot_id").read_text(), os.readlink("/proc/self/ns/pid")
    except OSError:
        return None


def _make_file(nbytes: int) -> int | None:
    try:
        file = os.memfd_create(_NAME)
        os.ftruncate(file, nbytes)
        return file
    except (AttributeError, OSError):       # not on Linux; or the system forbids it
        return None


def _open_all(entries: Sequence[tuple], nbytes: int) -> tuple[list[int], str]:
    """(the files opened, why one could not be)"""
    opened: list[int] = []
    for _, pid, file in entries:
        path = f"/proc/{pid}/fd/{file}"
        try:
            if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
                return opened, f"{path} is another file than process {pid} said"
            opened.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            return opened, f"process {os.getpid()} may not see memory of process {pid}: {error}"
        if (found := os.fstat(opened[-1]).st_size) != nbytes:
            return opened, f"process {pid} shares {found} bytes where process {os.getpid()} shares {nbytes}"
    return opened, ""


@functools.cache
def _warn_once(why: str) -> None:
    logger.warning("sharded weights travel in messages between the processes of this host, which is slower: %s", why)


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


def _up_to_page(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


def _map(address: int | None, nbytes: int, flags: int, file: int, offset: int) -> int:
    """Private, so that writing changes nobody's pages but one's own."""
    flags |= mmap.MAP_PRIVATE | _MAP_NORESERVE
    at = _libc().mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, file, offset)
    if at == ctypes.c_void_p(-1).value:
        code = ctypes.get_errno()
        raise OSError(code, f"cannot map {nbytes} bytes of the host's memory: {os.strerror(code)}")
    return at
