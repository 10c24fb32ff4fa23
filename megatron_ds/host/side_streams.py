"""Streams of a GPU beside the one on which the model computes, each for one kind of work.

    reductions   casts of gradients, their reductions, and the additions of the sums to the shards
    gathers      all-gathers of weights, behind copies of offloaded shards
    to host      copies of gradients to the host            to device   copies of weights from the host

NCCL has streams of its own: a collective begins when the stream from which it was called reaches it, and the
stream that waits for it goes on afterwards. Called from the stream of the model, both ends of a reduction
would stand in the way of the backward; called from a stream beside it, only NCCL waits.

    with side_stream(device, "reductions").behind_current():      # after what the current stream has so far
        work = all_reduce_(gradient, group, async_op=True)
        work.wait()                                               # the side stream waits
    mark = side_stream(device, "reductions").mark()
    mark.wait()                                                   # the current stream waits

On a CPU there are no streams: the work is done at once, in the order of the program.

Note: memory. torch's allocator gives freed memory to the next kernel of the stream that allocated it. What a
side stream uses is therefore allocated inside its context, or kept until the stream that allocated it has
waited for the side stream. tests/kernels/test_gpu_steps.py checks this on recorded steps.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

# Transfers wait for the kernels of these streams, which are short. With this priority they run before the blocks
# that are left of a product that has begun.
PRIORITIES = {"reductions": -1, "gathers": -1}


class Mark:
    """A point of a stream. event: None on a CPU, where it is always reached."""

    __slots__ = ("_event",)

    def __init__(self, event: Any = None):
        self._event = event

    def wait(self) -> None:
        """Let what is queued on the current stream from now on run after the mark. The host does not wait."""
        if self._event is not None:
            self._event.wait()

    def is_completed(self) -> bool:
        """Return whether the stream has reached the mark. The host waits for a mark by mpu/host_reads.py."""
        return self._event is None or self._event.query()


class SideStream:
    """A stream of `device`. priority: the lower number goes first."""

    def __init__(self, device: torch.device, priority: int = 0):
        is_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device, priority) if is_cuda else None

    @contextmanager
    def behind_current(self) -> Iterator[None]:
        """Queue the work of the block on this stream, behind the work that is on the current stream by now."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with self.apart():
            yield

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Queue the work of the block on this stream, in no order with the current one."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield

    def mark(self) -> Mark:
        """Return a mark at the end of the work that is queued on this stream by now."""
        return Mark() if self._stream is None else Mark(self._stream.record_event())


@cache
def side_stream(device: torch.device, kind: str) -> SideStream:
    """Return the stream of a device for one kind of work."""
    return SideStream(device, PRIORITIES.get(kind, 0))
