"""Part of a file as memory, shared with everything else that uses the file.

Not Python's mmap: that keeps a descriptor open for each map, of which a process has few, and holds up all threads while it
writes pages back.
"""

import ctypes
import functools
import mmap
import os
import weakref

import torch

MS_SYNC = 4
FAILED = ctypes.c_void_p(-1).value


class FileMap:
    """`length` bytes from `offset`, a multiple of the page size, writable. Linux.

    It stays, also when the descriptor is closed, while this object or a tensor of it lives. Raises OSError.
    """

    def __init__(self, fd: int, offset: int, length: int):
        access = mmap.PROT_READ | mmap.PROT_WRITE
        self._address, self._length = _libc().mmap(None, length, access, mmap.MAP_SHARED, fd, offset), length
        if self._address == FAILED:
            raise _error()
        self._bytes = (ctypes.c_char * length).from_address(self._address)
        # The array is what tensors keep. Not at exit: tensors may be used until the very end, and the kernel cleans up.
        weakref.finalize(self._bytes, _libc().munmap, self._address, length).atexit = False

    def tensor(self, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """[numel], from the start of the map."""
        return torch.frombuffer(self._bytes, dtype=dtype, count=numel)

    def flush(self) -> None:
        """On return all that was written is on the disk. Raises OSError."""
        if _libc().msync(self._address, self._length, MS_SYNC):
            raise _error()

    def drop(self) -> None:
        """Give back the memory; the next touch takes the page from the page cache or the disk."""
        if _libc().madvise(self._address, self._length, mmap.MADV_DONTNEED):
            raise _error()


@functools.cache
def _libc() -> ctypes.CDLL:
    """Its calls run without Python's lock."""
    libc = ctypes.CDLL(None, use_errno=True)
    address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.argtypes, libc.mmap.restype = (address, size, number, number, number, ctypes.c_long), address
    libc.munmap.argtypes = address, size
    libc.msync.argtypes = libc.madvise.argtypes = address, size, number
    return libc


def _error() -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))
