"""Large files written from start to end, and parts of them read, without the page cache.

A gigabyte costs a fraction of the system time that way, and the pages of other files stay in memory. Without
O_DIRECT in the file system, everything goes through the page cache.

    `BlockFile`    collects bytes in blocks of whole pages, and sends each full one to where a subclass writes it
    `DirectFile`   writes a full block on a thread while the next one is filled. The rest at the end goes through
                   the page cache
    `read_range`   reads whole pages around the range, unless most of it is in the page cache
"""

import ctypes
import errno
import io
import mmap
import os
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import singledispatch

import torch

from .async_io import ALIGNMENT
from .large_pages import round_up
from .memory_maps import libc
from .reused_pages import uninitialized

BLOCK = 16 * 2**20  # bytes: a disk is fast with transfers of megabytes
TILE = 2**15  # elements cast at once: they stay in the cache, and torch uses one thread
LEAST_DIRECT = 2**20  # bytes: a smaller range is read through the page cache
O_DIRECT = getattr(os, "O_DIRECT", 0)
CACHESTAT = 451  # number of the system call, on all processors; Linux 6.5


class BlockFile(io.RawIOBase):
    """A file that is written from start to end: `write`, `write_tensor`, which casts while it copies, and `tell`.

    A subclass has `_send`, which takes the full block, and `sync`, which makes all bytes durable.
    """

    def __init__(self):
        super().__init__()
        # The first block is filled. A subclass may add a second one, which is on its way to the disk meanwhile.
        self._blocks = [_new_block()]
        # offset and bytes of the block that is filled
        self._start = 0
        self._filled = 0

    def writable(self) -> bool:
        """True."""
        return True

    def sync(self) -> None:
        """Make all bytes durable."""
        raise NotImplementedError

    def _send(self) -> None:
        """Take the full block, and make the other one the next to fill."""
        raise NotImplementedError

    def tell(self) -> int:
        """Return the number of bytes written."""
        return self._start + self._filled

    def write(self, data) -> int:
        """Append all of a buffer."""
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view):
            count = min(len(view) - done, BLOCK - self._filled)
            self._blocks[0][self._filled : self._filled + count] = view[
                done : done + count
            ]
            self._add(count)
            done += count
        return len(view)

    def write_tensor(self, values: torch.Tensor, dtype: torch.dtype) -> None:
        """Append the elements in row-major order, cast to `dtype`, straight into the blocks.

        A tensor that is not contiguous is copied as a whole first.
        """
        if self.tell() % dtype.itemsize:
            self.write(values.to(dtype).contiguous().view(-1).view(torch.uint8).numpy())
            return
        flat = values.detach().contiguous().view(-1)
        done = 0
        while done < len(flat):
            count = min(
                (BLOCK - self._filled) // dtype.itemsize, TILE, len(flat) - done
            )
            target = torch.frombuffer(
                self._blocks[0], dtype=dtype, count=count, offset=self._filled
            )
            target.copy_(flat[done : done + count])
            self._add(count * dtype.itemsize)
            done += count

    def appended(self, content: memoryview) -> None:
        """Take notice of bytes after they were copied into a block. All bytes of the file pass here, part by part."""

    def _add(self, count: int) -> None:
        self.appended(memoryview(self._blocks[0])[self._filled : self._filled + count])
        self._filled += count
        if self._filled == BLOCK:
            self._send()


class DirectFile(BlockFile):
    """A file object for `open(path, "wb", buffering=0)`, with `flush`, `fileno` and `close`.

    Without `flush`, bytes of the last block are in memory alone. Raises OSError as `open` and `write` do, also for
    a block that was written in the background. Not for several threads.
    """

    def __init__(self, path: str | os.PathLike):
        super().__init__()
        self._fd = os.open(
            path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666
        )
        self._path = path
        self._direct_fd: int | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._flight: Future | None = None

    def fileno(self) -> int:
        """Return the descriptor without O_DIRECT, such as for os.fsync."""
        return self._fd

    def sync(self) -> None:
        """Make all bytes durable."""
        self.flush()
        os.fsync(self._fd)

    def flush(self) -> None:
        """Hand all bytes to the operating system; they are durable after os.fsync."""
        super().flush()
        self._wait()
        if self._filled:  # written once more, directly, when the block is full
            _write_all(
                self._fd, memoryview(self._blocks[0])[: self._filled], self._start
            )

    def close(self) -> None:
        """Flush, and free descriptors and memory."""
        if self.closed:
            return
        try:
            super().close()  # flushes
        finally:
            if self._pool is not None:
                self._pool.shutdown(wait=True)
            for fd in (self._fd, self._direct_fd):
                if fd is not None:
                    os.close(fd)
            self._blocks = []

    def _send(self) -> None:
        """Write the full block in the background, and go on with the other one."""
        self._wait()
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "direct-file")
            self._blocks.append(_new_block())
            with suppress(OSError):  # a file system without O_DIRECT
                self._direct_fd = os.open(
                    self._path, os.O_WRONLY | O_DIRECT | os.O_CLOEXEC
                )
        self._flight = self._pool.submit(
            self._write_block, self._blocks[0], self._start
        )
        self._blocks.reverse()
        self._start = self._start + BLOCK
        self._filled = 0

    def _wait(self) -> None:
        if self._flight is not None:
            flight = self._flight
            self._flight = None
            flight.result()

    def _write_block(self, block: mmap.mmap, offset: int) -> None:
        if self._direct_fd is not None:
            try:
                return _write_all(self._direct_fd, memoryview(block), offset)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                # The file system accepts O_DIRECT and refuses the write.
                os.close(self._direct_fd)
                self._direct_fd = None
        _write_all(self._fd, memoryview(block), offset)


def _new_block() -> mmap.mmap:
    """Return memory that begins at a page, as O_DIRECT needs it; pages are allocated when they are touched."""
    return mmap.mmap(-1, BLOCK)


def _write_all(fd: int, view: memoryview, offset: int) -> None:
    while view:
        count = os.pwrite(fd, view, offset)
        view = view[count:]
        offset = offset + count


@singledispatch
def read_range(path: str | os.PathLike, offset: int, length: int) -> torch.Tensor:
    """Return uint8 [length], the bytes from `offset` on; fewer if the file ends before. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        length = max(0, min(length, os.fstat(fd).st_size - offset))
        if length >= LEAST_DIRECT and O_DIRECT and not _is_cached(fd, offset, length):
            # The file system may lack O_DIRECT. An error of the disk occurs again in the read below.
            with suppress(OSError):
                return _read_pages(path, offset, length)
        found = torch.empty(length, dtype=torch.uint8)
        return found[: _read_all(fd, found, offset, length)]
    finally:
        os.close(fd)


def _is_cached(fd: int, offset: int, length: int) -> bool:
    """Return whether the page cache has most of the range. False where this is unknown.

    A read with RWF_NOWAIT does not answer that: where the disk is fast, it succeeds by reading the page.
    """
    if not sys.platform.startswith("linux"):
        return False
    wanted = (ctypes.c_uint64 * 2)(offset, length)
    found = (ctypes.c_uint64 * 5)()
    failed = libc().syscall(CACHESTAT, fd, ctypes.byref(wanted), ctypes.byref(found), 0)
    return not failed and found[0] * mmap.PAGESIZE > length // 2


def _read_pages(path: str | os.PathLike, offset: int, length: int) -> torch.Tensor:
    before = offset % ALIGNMENT
    size = round_up(before + length, ALIGNMENT)
    room = uninitialized((size + ALIGNMENT,), torch.uint8)
    pages = room[-room.data_ptr() % ALIGNMENT :][:size]
    fd = os.open(path, os.O_RDONLY | O_DIRECT | os.O_CLOEXEC)
    try:
        count = _read_all(fd, pages, offset - before, before + length)
    finally:
        os.close(fd)
    return pages[before : max(before, min(before + length, count))]


def _read_all(fd: int, target: torch.Tensor, offset: int, least: int) -> int:
    """Fill `target` until `least` bytes are read, and return their number; it is less where the file ends."""
    view = target.numpy().data
    done = 0
    while done < least and (count := os.preadv(fd, [view[done:]], offset + done)):
        done += count
    return done
