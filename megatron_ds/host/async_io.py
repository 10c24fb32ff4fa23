"""Reads and writes of files in the background: through io_uring, or on threads where io_uring does not work.

    work = io.read(fd, tensor, offset)      # returns at once
    ...                                     # until `wait` the tensor must be neither read nor written
    work.wait()

A transfer is cut into blocks, many of which are in flight together: a disk is fast only with a queue. Both
engines transfer the same bytes and raise the same errors; they differ in speed only. io_uring
(csrc/host/async_io.cpp, an optional extension) uses less CPU time: one thread that mostly sleeps keeps the queue
full, without the GIL.
"""

import concurrent.futures
import contextlib
import errno
import functools
import importlib
import logging
import os
import threading
from dataclasses import dataclass

import torch

from ..errors import ConfigError
from .transfers import Transfer

logger = logging.getLogger(__name__)

# Bytes: the alignment of address, length and offset for direct access on any usual disk.
ALIGNMENT = 4096
MOST_IN_FLIGHT = 4096
ENGINES = ("auto", "io_uring", "threads")


class AsyncIO:
    """An engine. tensor: contiguous, on the CPU, any dtype; offset: bytes from the start of the file.

    Transfers overlap and complete in any order. Several threads may call it; a forked child may not.
    """

    def read(self, fd: int, tensor: torch.Tensor, offset: int) -> Transfer:
        """Start to fill `tensor` from the file."""
        return self._start(_Request(False, fd, bytes_of(tensor), offset))

    def write(self, fd: int, tensor: torch.Tensor, offset: int) -> Transfer:
        """Start to write `tensor` to the file."""
        return self._start(_Request(True, fd, bytes_of(tensor), offset))

    def close(self) -> None:
        """Wait for all transfers, and free threads and descriptors; the engine cannot be used afterwards."""

    def _start(self, request: "_Request") -> Transfer:
        raise NotImplementedError


@dataclass(frozen=True)
class _Request:
    """A transfer. view: uint8."""

    writes: bool
    fd: int
    view: torch.Tensor
    offset: int

    def check(self, moved: int, error: int) -> None:
        """Raises OSError unless all bytes were moved."""
        if error or moved != len(self.view):
            why = os.strerror(error) if error else "the file ends there"
            doing = "writing" if self.writes else "reading"
            raise OSError(
                error or errno.EIO,
                f"{doing} {len(self.view)} bytes at offset {self.offset} moved "
                f"{moved}: {why}",
            )


def make_io(
    kind: str = "auto",
    *,
    queue_depth: int = 32,
    threads: int = 8,
    block_bytes: int = 1 << 20,
) -> AsyncIO:
    """Return the engine of that name; "auto" is io_uring where it works, else threads, with one line in the log.

    queue_depth, threads: blocks in flight together, of io_uring and of threads. Raises ConfigError for other
    names, impossible numbers, and for io_uring where it does not work.
    """
    if kind not in ENGINES:
        raise ConfigError(
            f"Disk access '{kind}' does not exist. Use one of {', '.join(ENGINES)}."
        )
    if kind == "threads":
        return ThreadIO(threads, block_bytes)
    try:
        return UringIO(queue_depth, block_bytes)
    except OSError as reason:
        if kind == "io_uring":
            raise ConfigError(
                f"Disk access by io_uring was requested but does not work: {reason.strerror}. "
                "Use 'threads', or 'auto', which uses io_uring only if it works."
            ) from reason
        _log_threads(reason.strerror)
        return ThreadIO(threads, block_bytes)


class ThreadIO(AsyncIO):
    """`AsyncIO` by preadv and pwritev on `threads` threads, each of which transfers one block at a time."""

    def __init__(self, threads: int = 8, block_bytes: int = 1 << 20):
        self.block_bytes = _checked_block(block_bytes)
        self._pool = concurrent.futures.ThreadPoolExecutor(
            _checked_depth(threads), thread_name_prefix="disk"
        )

    def close(self) -> None:
        self._pool.shutdown()

    def _start(self, request: _Request) -> "_ThreadWork":
        view = request.view.numpy().data
        blocks = [
            self._pool.submit(
                _move_block,
                request.writes,
                request.fd,
                view[i : i + self.block_bytes],
                request.offset + i,
            )
            for i in range(0, len(view), self.block_bytes)
        ]
        return _ThreadWork(request, blocks)


@dataclass(frozen=True)
class _ThreadWork:
    request: _Request
    blocks: list[concurrent.futures.Future]

    def wait(self) -> None:
        # An error must not return while other blocks are still written, so all are waited for.
        results = [block.result() for block in self.blocks]
        errors = [error for _, error in results if error]
        self.request.check(
            sum(moved for moved, _ in results), errors[0] if errors else 0
        )


def _move_block(
    writes: bool, fd: int, view: memoryview, offset: int
) -> tuple[int, int]:
    """Return (bytes transferred, errno or 0). Fewer bytes than requested without an error: the file ends there."""
    move = os.pwritev if writes else os.preadv
    done = 0
    try:
        while done < len(view) and (moved := move(fd, [view[done:]], offset + done)):
            done += moved
    except OSError as error:
        # The file ends there: a direct read that was short leaves a rest that is not aligned, which is refused.
        at_end = done and error.errno == errno.EINVAL and not writes
        return done, 0 if at_end else error.errno or errno.EIO
    return done, 0


class UringIO(AsyncIO):
    """`AsyncIO` by io_uring, `queue_depth` blocks in flight. Raises OSError where it does not work."""

    def __init__(self, queue_depth: int = 32, block_bytes: int = 1 << 20):
        try:
            extension = importlib.import_module("megatron_ds._async_io")
        except ImportError as reason:
            raise OSError(
                errno.ENOSYS,
                f"io_uring is not compiled ({reason}); on Linux, reinstall "
                "megatron_ds with a C++17 compiler to have it",
            ) from reason
        self._ring = extension.Ring(
            _checked_depth(queue_depth), _checked_block(block_bytes)
        )
        self._try()

    def close(self) -> None:
        self._ring.close()

    def _start(self, request: _Request) -> "_UringWork":
        view = request.view
        ticket = self._ring.submit(
            request.writes, request.fd, view.data_ptr(), len(view), request.offset
        )
        return _UringWork(self._ring, ticket, request)

    def _try(self) -> None:
        """Write a page and read it back: a system may allow a ring and forbid its operations."""
        there = torch.arange(ALIGNMENT, dtype=torch.int16)
        back = torch.zeros(ALIGNMENT, dtype=torch.int16)
        fd = os.memfd_create("io_uring")
        try:
            self.write(fd, there, 0).wait()
            self.read(fd, back, 0).wait()
        finally:
            os.close(fd)
        if not torch.equal(there, back):
            raise OSError(errno.EIO, "io_uring returned a page with different content")


class _UringWork:
    """Keeps the tensor, which the kernel accesses, until the transfer is complete; dropping it waits."""

    def __init__(self, ring, ticket: int, request: _Request):
        self._ring = ring
        self._ticket = ticket
        self._request = request
        self._result: tuple[int, int] | None = None
        self._lock = threading.Lock()

    def wait(self) -> None:
        self._request.check(*self._ended())

    def _ended(self) -> tuple[int, int]:
        with self._lock:
            if self._result is None:
                self._result = self._ring.wait(self._ticket)
            return self._result

    def __del__(self):
        with contextlib.suppress(ValueError):  # in a forked child, which has no ring
            self._ended()


@functools.cache
def _log_threads(reason: str) -> None:
    logger.warning(
        "Disk access runs on threads, which costs more CPU time than io_uring would: %s.",
        reason,
    )


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory as uint8. Raises ValueError for a tensor that is on a GPU or not contiguous."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        how = "" if tensor.is_contiguous() else "not "
        raise ValueError(
            f"Disk access got a tensor on {tensor.device}, {how}contiguous: it must be on the "
            "CPU and contiguous. Copy it into one from aligned_empty."
        )
    return tensor.detach().view(-1).view(torch.uint8)


def _checked_block(block_bytes: int) -> int:
    if block_bytes < ALIGNMENT or block_bytes % ALIGNMENT or block_bytes > 1 << 30:
        raise ConfigError(
            f"Disk access by blocks of {block_bytes} bytes is impossible: direct access "
            f"transfers whole pages. Use a multiple of {ALIGNMENT}, at most {1 << 30}; a "
            "mebibyte or more is fast."
        )
    return block_bytes


def _checked_depth(blocks: int) -> int:
    if not 1 <= blocks <= MOST_IN_FLIGHT:
        raise ConfigError(
            f"{blocks} blocks in flight are not possible: use 1 to {MOST_IN_FLIGHT}; 32 are "
            "enough to keep a disk busy."
        )
    return blocks
