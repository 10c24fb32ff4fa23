"""`Channels`: activations and gradients between the ranks of a pipeline, each stream in its own order.

A channel is (source, destination, kind, chunk). Messages of one channel arrive in the order in which they
were sent; between channels there is no order. So the ranks of a pipeline schedule must agree on the order of
each stream only, not on when a send meets its receive. Sends return at once and keep their tensor until it
has been sent; receives are posted at once.

Note: two ranks that expect different tensors. Bytes received into a buffer of another shape are garbage, or
end the process. So the tag of a message depends on its shape and dtype: it never matches the receive of
another one. In addition ranks compare the shapes of each step (shape_check.py), so that a receiver reports
the difference at once instead of waiting for a message that never arrives.
"""

import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TypeVar

import torch

from ..errors import CommunicationError
from .group import Group, Transport, Work
from .shape_check import ShapeCheck

T = TypeVar("T")

_KINDS = {"act": 0, "grad": 1}
_NAMES = {"act": "an activation", "grad": "a gradient"}
SHAPES_TAG = 0                  # of the shape check; those of activations and gradients follow
LAST_TAG = (1 << 16) - 1        # transports use higher tags themselves


class Channels:
    """The channels of one rank. Destinations and sources are positions in `group`, the rank's own included.
    """

    def __init__(self, group: Group):
        self.group = group
        self._sent: dict[tuple, deque[tuple[torch.Tensor, Work]]] = defaultdict(deque)
        self._own: dict[tuple, deque[torch.Tensor]] = defaultdict(deque)
        self._check = ShapeCheck()

    def announce(self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> None:
        """Begin a step whose micro-batches have these shapes; peers compare them with theirs.

        The comparison with a peer happens at the first message to or from it in this step.
        """
        self._check.start(shapes, dtype)

    def send(self, kind: str, destination: int, tensor: torch.Tensor, chunk: int = 0) -> None:
        """Start sending `tensor`, which must not change until it has arrived. `kind` is "act" or "grad"."""
        tensor = tensor.detach().contiguous()
        if destination == self.group.rank:
            self._own[kind, chunk].append(tensor)
            return
        self._check.announce(destination,
                             lambda message: self._start(kind, destination, SHAPES_TAG, message, SHAPES_TAG))
        self.group.traffic.add("send", self.group.axes, self.group.size, tensor.nbytes)
        self._start(kind, destination, chunk, tensor, _tag(kind, chunk, tuple(tensor.shape), tensor.dtype))

    def recv(self, kind: str, source: int, shape: tuple[int, ...], dtype: torch.dtype,
             device: torch.device | str = "cpu", chunk: int = 0) -> "Pending":
        """Post the receive of the channel's next message. Its shape and dtype must be known; they are not
        sent.
        """
        if source == self.group.rank:
            return Pending(self, kind, source, None, None, lambda: self._own[kind, chunk].popleft())
        self._check.expect(source, lambda message: self._receive(kind, source, message, SHAPES_TAG))
        tensor = torch.empty(shape, dtype=dtype, device=device)
        work = self._receive(kind, source, tensor, _tag(kind, chunk, tuple(shape), dtype))
        return Pending(self, kind, source, tensor, work)

    def drain(self) -> None:
        """Wait until all messages of this rank have been sent. Call it at the end of a step."""
        for (kind, destination, _), waiting in self._sent.items():
            while waiting:
                self._guard(kind, self.group.rank, destination, waiting.popleft()[1].wait)
        assert not any(self._own.values()), "a message from this rank to itself was never received"

    def verify(self, kind: str, source: int) -> None:
        """Compare the shapes of the step with those of `source`, once a step. Raises CommunicationError."""
        wait = lambda work: self._guard(kind, source, self.group.rank, work.wait)
        if difference := self._check.verify(source, wait):
            ranks, me = self.group.ranks, self.group.rank
            raise CommunicationError(
                f"rank {ranks[me]} (pipeline position {me}) receives {_NAMES[kind]} from rank "
                f"{ranks[source]} (position {source}), but the shapes of their steps differ: {difference}. "
                "All stages must divide the same batch in the same way and use one dtype. Look for a rank "
                "with other data, another sequence length, micro-batch size or precision.")

    @property
    def num_waiting(self) -> int:
        """Messages whose tensors are still held because their sends are not known to be complete."""
        return sum(not work.is_completed() for waiting in self._sent.values() for _, work in waiting)

    @property
    def _transport(self) -> Transport:
        assert self.group.transport is not None, f"{self.group} has no transport: it has only one rank"
        return self.group.transport

    def _start(self, kind: str, destination: int, chunk: int, tensor: torch.Tensor, tag: int) -> None:
        waiting = self._sent[kind, destination, chunk]
        while waiting and waiting[0][1].is_completed():
            waiting.popleft()
        work = self._guard(kind, self.group.rank, destination,
                           lambda: self._transport.isend(tensor, destination, tag))
        waiting.append((tensor, work))

    def _receive(self, kind: str, source: int, tensor: torch.Tensor, tag: int) -> Work:
        return self._guard(kind, source, self.group.rank, lambda: self._transport.irecv(tensor, source, tag))

    def _guard(self, kind: str, source: int, destination: int, call: Callable[[], T]) -> T:
        """`call()`, with both ranks and the kind of message added to its CommunicationError."""
        try:
            return call()
        except CommunicationError as error:
            ranks, me = self.group.ranks, self.group.rank
            raise CommunicationError(
                f"rank {ranks[me]} (pipeline position {me}) was "
                f"{'sending' if me == source else 'waiting for'} {_NAMES[kind]} from rank {ranks[source]} to "
                f"rank {ranks[destination]}: {error}") from error


class Pending:
    """A receive under way."""

    __slots__ = ("_channels", "_kind", "_source", "_tensor", "_work", "_take")

    def __init__(self, channels: Channels, kind: str, source: int, tensor: torch.Tensor | None,
                 work: Work | None, take: Callable[[], torch.Tensor] | None = None):
        self._channels, self._kind, self._source = channels, kind, source
        self._tensor, self._work, self._take = tensor, work, take

    def wait(self) -> torch.Tensor:
        """The message. Raises CommunicationError with sender, receiver and kind when it does not arrive in
        time.
        """
        if self._take is not None:
            return self._take()
        self._channels.verify(self._kind, self._source)
        self._channels._guard(self._kind, self._source, self._channels.group.rank, self._work.wait)
        return self._tensor


@lru_cache(maxsize=4096)
def _tag(kind: str, chunk: int, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Odd for gradients, even for activations, so that a transport can separate the two streams."""
    return 2 + _KINDS[kind] + 2 * (zlib.crc32(repr((chunk, shape, dtype)).encode()) % (LAST_TAG // 2 - 1))
