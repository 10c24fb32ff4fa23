"""Memory maps: anonymous pages, large ones where the system offers them, and parts of a file. Also the C
library's calls.

Large pages need Linux with transparent huge pages on request ("madvise", the usual setting). A sweep over
gigabytes then spends no time on page tables: the CPU's Adam step takes a fifth less.

`FileMap` is not Python's mmap, which keeps a descriptor open for each map, of which a process has few, and
holds the interpreter's lock while it writes pages back.
"""

import ctypes
import functools
import mmap
import os
import weakref

import torch

LARGE_PAGE_BYTES = 2 << 20
MAP_FAILED = ctypes.c_void_p(-1).value
MS_SYNC = 4


def huge_page_zeros(numel: int, *, dtype: torch.dtype = torch.float32,
                    device: torch.device | str = "cpu") -> torch.Tensor:
    """torch.zeros(numel). On the CPU a large one is a memory map: freed, it is returned to the system at
    once.
    """
    nbytes = numel * dtype.itemsize
    is_large = nbytes >= 2 * LARGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE")
    if torch.device(device).type != "cpu" or not is_large:
        return torch.zeros(numel, dtype=dtype, device=device)
    return anonymous_zeros(numel, dtype)


def anonymous_zeros(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """[numel] zeros on the CPU that begin at a page, on large pages if there are several; numel > 0."""
    nbytes = numel * dtype.itemsize
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}
    pages = mmap.mmap(-1, nbytes, **private)
    if nbytes >= 2 * LARGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)       # before the first touch, which allocates a page
    return torch.frombuffer(pages, dtype=dtype, count=numel)        # keeps the map


class FileMap:
    """`length` bytes of a file from `offset`, a multiple of the page size, as writable shared memory. Linux.

    The map outlives the descriptor: it is removed with this object and the last tensor of it. Raises OSError.
    """

    def __init__(self, fd: int, offset: int, length: int):
        access = mmap.PROT_READ | mmap.PROT_WRITE
        self._address, self._length = libc().mmap(None, length, access, mmap.MAP_SHARED, fd, offset), length
        if self._address == MAP_FAILED:
            raise os_error()
        self._bytes = memory_at(self._address, length)

    def tensor(self, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """[numel], from the start of the map."""
        return torch.frombuffer(self._bytes, dtype=dtype, count=numel)

    def flush(self) -> None:
        """Write all changes to the disk. Raises OSError."""
        if libc().msync(self._address, self._length, MS_SYNC):
            raise os_error()

    def drop(self) -> None:
        """Free the pages; the next access reads them from the page cache or the disk."""
        if libc().madvise(self._address, self._length, mmap.MADV_DONTNEED):
            raise os_error()


@functools.cache
def libc() -> ctypes.CDLL:
    """The calls that Python's `mmap` lacks, or makes with the interpreter's lock held."""
    library = ctypes.CDLL(None, use_errno=True)
    address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    library.mmap.argtypes = address, size, number, number, number, ctypes.c_int64
    library.mmap.restype = address
    library.munmap.argtypes = address, size
    library.msync.argtypes = library.madvise.argtypes = library.mprotect.argtypes = address, size, number
    return library


def memory_at(address: int, nbytes: int) -> ctypes.Array:
    """A buffer over mapped memory, which is unmapped with the last reference to the buffer.

    Not at exit: tensors may be used until the very end, and the kernel cleans up.
    """
    memory = (ctypes.c_char * nbytes).from_address(address)
    weakref.finalize(memory, libc().munmap, address, nbytes).atexit = False
    return memory


def os_error() -> OSError:
    """The error of the last failed call of `libc`."""
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))
