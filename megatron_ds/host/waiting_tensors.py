"""Tensors of a GPU that wait in host memory from a forward to its backward.

    model         | block 0 | block 1 | block 2 | … | backward 2 | backward 1 | backward 0 |
    to host       |  x 0 →  |  x 1 →  |
    to device                                       |   ← x 1    |   ← x 0    |

A copy to the host runs beside the model and has until the next tensor is put; then the stream of the model
waits for it, and the device memory is free. So the last tensor that was put is still on the device when a
backward starts at once. When a tensor is taken, the one put before it begins to come back. The device holds
two tensors, whatever their number. Rajbhandari et al. 2020 (arXiv:1910.02054), section 6.1, "Pa+cpu".

Host buffers are used again in the order of the streams: a copy to the host begins behind the stream of the model,
which has waited for all copies of a tensor before its buffer is given back. So there are as many buffers as tensors
wait at a time, also while the host is a step ahead of the device.

The meta device stands for a GPU in plans: it holds the same memory, and nothing is copied.
"""

import weakref

import torch

from .page_locked import PageLockedPool
from .side_streams import Mark, side_stream


class WaitingTensor:
    """A tensor of which `WaitingTensors.put` made a copy in host memory.

    near    the tensor on the device, while it is there
    before  the tensor that was put before it in the same micro-batch, while that waits
    """

    def __init__(
        self, x: torch.Tensor, before: "WaitingTensor | None", pool: PageLockedPool
    ):
        self.near: torch.Tensor | None = x
        self._before = None if before is None else weakref.ref(before)
        self.shape = x.shape
        self.dtype = x.dtype
        self.device = x.device
        self.nbytes = x.nbytes
        self._pool = pool
        self._buffer: torch.Tensor | None = None
        self._copied = Mark()
        if x.device.type != "meta" and x.nbytes:
            self._buffer, _ = pool.borrow(x.nbytes)
            stream = side_stream(x.device, "to host")
            with stream.behind_current():
                self._far(self._buffer).copy_(x, non_blocking=True)
                self._copied = stream.mark()

    def __del__(self):
        """Return the host memory of a tensor that was not taken, because a backward has ended early."""
        if self._buffer is not None:
            self.leave()
            self.give_back()

    def _far(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return the copy in host memory."""
        return buffer.view(self.dtype).view(self.shape)

    def give_back(self) -> None:
        """Let go of the host memory. The current stream has waited for its copies (`leave`)."""
        if self._buffer is not None:
            self._pool.give(self._buffer)
            self._buffer = None

    @property
    def before(self) -> "WaitingTensor | None":
        return None if self._before is None else self._before()

    def leave(self) -> torch.Tensor | None:
        """Let go of `near`, and return it. The current stream waits for the copy that reads or writes it."""
        self._copied.wait()
        x = self.near
        self.near = None
        return x

    def come(self) -> None:
        """Begin to copy the tensor to the device."""
        # The stream of the model allocates it and waits for the copy, so it can be freed as any other tensor.
        self.near = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        if self._buffer is not None:
            stream = side_stream(self.device, "to device")
            with stream.behind_current():
                self._copied.wait()
                self.near.copy_(self._far(self._buffer), non_blocking=True)
                self._copied = stream.mark()


class WaitingTensors:
    """The waiting tensors of a rank."""

    def __init__(self):
        self._last: weakref.WeakKeyDictionary[object, weakref.ref] = (
            weakref.WeakKeyDictionary()
        )
        self._leaving: WaitingTensor | None = None
        self._all: weakref.WeakSet[WaitingTensor] = weakref.WeakSet()
        self._pool = PageLockedPool()

    def put(self, x: torch.Tensor, microbatch: object) -> WaitingTensor:
        """Begin to copy x to the host. microbatch: an object that all tensors of one have in common, which
        come back in the reverse order."""
        if self._leaving is not None:
            self._leaving.leave()
        last = self._last.get(microbatch)
        self._leaving = waiting = WaitingTensor(
            x.detach(), None if last is None else last(), self._pool
        )
        self._last[microbatch] = weakref.ref(waiting)
        self._all.add(waiting)
        return waiting

    def take(self, waiting: WaitingTensor) -> torch.Tensor:
        """Return the tensor on the device, once. The host does not wait."""
        if self._leaving is waiting:
            self._leaving = None
        if waiting.near is None:
            waiting.come()
        x = waiting.leave()
        assert x is not None, "it was near, or has come"
        waiting.give_back()
        before = waiting.before
        if before is not None and before.near is None:
            before.come()
        return x

    @property
    def nbytes(self) -> int:
        """Bytes in host memory."""
        return sum(waiting.nbytes for waiting in self._all)
