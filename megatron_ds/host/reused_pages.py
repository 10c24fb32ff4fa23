"""Memory that serves one large tensor after another.

To read a gigabyte into fresh pages takes as much time for the pages, which the system fills with zeros, as
for a fast disk.

    with reused_pages():                    # for all threads of the process
        a = uninitialized(shape, dtype)
        del a
        b = uninitialized(shape, dtype)     # in the memory of `a`

A tensor may be used after the block; its memory is then unmapped with it.
"""

import ctypes
import mmap
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Lock

import torch

from .large_pages import LARGE_PAGE_BYTES, huge_pages, round_up

LEAST = 4 * 2**20  # bytes of a tensor
MOST_FREE = 2**30  # bytes that wait for a tensor


def uninitialized(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return torch.empty on the CPU. Within `reused_pages` a large tensor begins at a page."""
    pool = _shared.pool
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    if pool is None or nbytes < LEAST:
        return torch.empty(tuple(shape), dtype=dtype)
    return pool.take(nbytes).view(dtype).view(tuple(shape))


@contextmanager
def reused_pages() -> Iterator[None]:
    """Let `uninitialized` reuse the memory of tensors that were dropped within the block. Blocks of all threads
    share the memory."""
    with _shared.lock:
        _shared.users += 1
        _shared.pool = _shared.pool or _Pool()
    try:
        yield
    finally:
        with _shared.lock:
            _shared.users -= 1
            if not _shared.users:
                _shared.pool = None


class _Pool:
    """Maps that no tensor uses, in the order of their return."""

    def __init__(self):
        self._lock = Lock()
        self._free = []
        # Finalizers append to it without the lock: they may run while any code, also this class, holds it.
        self._returned: deque[mmap.mmap] = deque()

    def take(self, nbytes: int) -> torch.Tensor:
        """Return uint8 [nbytes], in the smallest free map that is not more than twice as large, or in a new one."""
        with self._lock:
            while self._returned:
                self._free.append(self._returned.popleft())
            fitting = [
                pages for pages in self._free if nbytes <= len(pages) <= 2 * nbytes
            ]
            pages = min(fitting, key=len, default=None)
            if pages is not None:
                self._free.remove(pages)
            while sum(map(len, self._free)) > MOST_FREE:
                del self._free[0]
        if pages is None:
            pages = huge_pages(round_up(nbytes, LARGE_PAGE_BYTES))
        memory = (ctypes.c_char * len(pages)).from_buffer(pages)
        weakref.finalize(memory, _return, weakref.ref(self), pages).atexit = False
        # The tensor keeps `memory` alive.
        return torch.frombuffer(memory, dtype=torch.uint8, count=nbytes)


def _return(pool: "weakref.ref[_Pool]", pages: mmap.mmap) -> None:
    if (there := pool()) is not None:
        there._returned.append(pages)


class _Shared:
    pool: _Pool | None = None
    users = 0
    lock = Lock()


_shared = _Shared()
