"""Page-locked host memory in exactly the size that is asked for, and buffers of it that streams use in turn.

torch's `pin_memory=True` rounds each block up to a power of two: 17 GiB of masters would take 32. Here the driver
locks pages that the process has mapped. It takes some milliseconds for each block, so this is for memory that a
run keeps.
"""

import ctypes
import mmap
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import torch

from ..errors import MegatronDSError
from .large_pages import huge_pages
from .side_streams import Mark


def page_locked(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a flat CPU tensor of zeros, with which a GPU exchanges data while the host goes on.

    When its last view is freed, the host waits for the device and returns the pages. Raises MegatronDSError when
    the driver does not lock them.
    """
    if numel == 0:
        return torch.empty(0, dtype=dtype)
    nbytes = numel * dtype.itemsize
    pages = huge_pages(nbytes)
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    runtime = torch.cuda.cudart()
    status = runtime.cudaHostRegister(address, nbytes, 0)
    if status != runtime.cudaError.success:
        raise MegatronDSError(
            f"the driver cannot lock {nbytes / 2**30:.2f} GiB of host memory ({status}): the host has too little "
            "memory, or the limit of locked memory (ulimit -l) is too low. Raise the limit, or offload less "
            "(--offload-optimizer-ratio, or nvme in place of cpu)."
        )
    memory = (ctypes.c_char * nbytes).from_address(address)
    wait = torch.cuda.synchronize
    unlocking = weakref.finalize(memory, _unlock, wait, runtime, address, pages)
    unlocking.atexit = False
    return torch.frombuffer(memory, dtype=dtype, count=numel)


def _unlock(
    wait: Callable[[], None], runtime: Any, address: int, pages: mmap.mmap
) -> None:
    """Unlock pages when no copy uses them any more. They stay mapped until then."""
    wait()
    runtime.cudaHostUnregister(address)


class PageLockedPool:
    """Buffers that are lent and given back; never more of them than were lent at one time.

    A buffer may be given back with a mark behind its last use by a stream. Its next use waits for the mark, unless
    the streams have this order anyway.
    """

    def __init__(self):
        self._free: defaultdict[int, deque[tuple[torch.Tensor, Mark]]] = defaultdict(
            deque
        )

    def borrow(self, nbytes: int) -> tuple[torch.Tensor, Mark]:
        """Return (uint8 [nbytes], what to wait for before it is written). The buffer is the one that was given
        back first, or a new one."""
        free = self._free[nbytes]
        return free.popleft() if free else (page_locked(nbytes, torch.uint8), Mark())

    def give(self, buffer: torch.Tensor, mark: Mark | None = None) -> None:
        """Take a buffer back. mark: a point behind its last use."""
        self._free[buffer.numel()].append((buffer, mark or Mark()))
