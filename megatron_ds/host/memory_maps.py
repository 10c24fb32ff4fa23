"""Memory maps by calls of the C library, and `FileMap`, a part of a file as memory.

`FileMap` is not Python's mmap, which keeps a descriptor open for each map, of which a process has few, and
holds the interpreter's lock while it writes pages back.
"""

import ctypes
import functools
import mmap
import os
import weakref

import torch

MAP_FAILED = ctypes.c_void_p(-1).value
MS_SYNC = 4


class FileMap:
    """`length` bytes of a file from `offset`, a multiple of the page size, as writable shared memory. Linux.

    The map outlives the descriptor: it is removed with this object and the last tensor of it. Raises OSError.
    """

    def __init__(self, fd: int, offset: int, length: int):
        access = mmap.PROT_READ | mmap.PROT_WRITE
        self._address = libc().mmap(None, length, access, mmap.MAP_SHARED, fd, offset)
        self._length = length
        if self._address == MAP_FAILED:
            raise os_error()
        self._bytes = memory_at(self._address, length)

    def tensor(self, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """Return [numel], from the start of the map."""
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
    """Return the C library for calls that Python's `mmap` lacks, or makes while it holds the lock of the
    interpreter."""
    library = ctypes.CDLL(None, use_errno=True)
    address = ctypes.c_void_p
    size = ctypes.c_size_t
    number = ctypes.c_int
    library.mmap.argtypes = address, size, number, number, number, ctypes.c_int64
    library.mmap.restype = address
    library.munmap.argtypes = address, size
    library.msync.argtypes = library.madvise.argtypes = library.mprotect.argtypes = (
        address,
        size,
        number,
    )
    return library


def memory_at(address: int, nbytes: int) -> ctypes.Array:
    """Return a buffer over mapped memory, which is unmapped with the last reference to the buffer.

    Not at exit: tensors may be used until the very end, and the kernel cleans up.
    """
    memory = (ctypes.c_char * nbytes).from_address(address)
    weakref.finalize(memory, libc().munmap, address, nbytes).atexit = False
    return memory


def os_error() -> OSError:
    """Return the error of the last failed call of `libc`."""
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))
