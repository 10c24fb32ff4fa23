"""`Channels`: activations and gradients between the ranks of a pipeline, each stream in its own order.

A channel is (source, destination, kind, chunk). Messages of one channel arrive in the order in which they were sent; between
channels there is no order, so a pipeline schedule needs no agreement on when a send meets a receive, only on the order of
each stream. Sends return at once and keep their tensor until it is gone; receives are posted at once.

Note: two ranks that mean different tensors. Bytes that land in a buffer of another shape are garbage, or end the process. So
the tag of a message depends on its shape and dtype: another one is never taken for it. And once a step and pair of ranks, in
front of the first message, goes a `promise` of what will be sent (shape_check.py), so that the receiver can say at once who meant
what, instead of waiting for something that never comes.
"""

import zlib
from collections import defaultdict, deque
from collections.abc import Sequence
from functools import lru_cache

import torch

from ..errors import CommunicationError
from .group import Group, Work
from .shape_check import difference, make_promise

_KINDS = {"act": 0, "grad": 1}
WORDS = {"act": "an activation", "grad": "a gradient"}
PROMISE = 0                     # its tag; those of messages follow
LAST_TAG = (1 << 16) - 1        # transports use higher ones themselves


class Channels:
    """The channels of one rank. Destinations and sources are positions in `group`, the rank's own included."""

    def __init__(self, group: Group):
        self.group = group
        self._sent: dict[tuple, deque[tuple[torch.Tensor, Work]]] = defaultdict(deque)
        self._own: dict[tuple, deque[torch.Tensor]] = defaultdict(deque)
        self._promise: torch.Tensor | None = None
        self._told: set[int] = set()                                    # destinations that have this step's promise
        self._heard: dict[int, tuple[torch.Tensor, Work] | None] = {}   # source → its promise under way; None: it was kept

    def begin(self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> None:
        """A step begins: of each micro-batch, the shape of what will be sent and received. The ranks' words are compared."""
        self._promise = make_promise(shapes, dtype)
        self._told, self._heard = set(), {}

    def send(self, kind: str, destination: int, tensor: torch.Tensor, chunk: int = 0) -> None:
        """Start sending `tensor`, which must not change until it has arrived. `kind` is "act" or "grad"."""
        tensor = tensor.detach().contiguous()
        if destination == self.group.rank:
            self._own[kind, chunk].append(tensor)
            return
        if self._promise is not None and destination not in self._told:
            self._told.add(destination)
            self._start(kind, destination, PROMISE, self._promise, PROMISE)
        self.group.traffic.add("send", self.group.axes, self.group.size, tensor.numel() * tensor.element_size())
        self._start(kind, destination, chunk, tensor, _tag(kind, chunk, tuple(tensor.shape), tensor.dtype))

    def recv(self, kind: str, source: int, shape: tuple[int, ...], dtype: torch.dtype,
             device: torch.device | str = "cpu", chunk: int = 0) -> "Pending":
        """Post the receive of the channel's next message. Shape and dtype are known beforehand; nothing is negotiated."""
        if source == self.group.rank:
            return Pending(self, kind, source, None, None, lambda: self._own[kind, chunk].popleft())
        if self._promise is not None and source not in self._heard:
            theirs = torch.empty_like(self._promise)
            self._heard[source] = theirs, self._guard(kind, source, self.group.rank,
                                                      lambda: self._transport.irecv(theirs, source, PROMISE))
        tensor, tag = torch.empty(shape, dtype=dtype, device=device), _tag(kind, chunk, tuple(shape), dtype)
        work = self._guard(kind, source, self.group.rank, lambda: self._transport.irecv(tensor, source, tag))
        return Pending(self, kind, source, tensor, work)

    def drain(self) -> None:
        """Return once every message sent from here has left. Call it at the end of a step."""
        for (kind, destination, _), waiting in self._sent.items():
            while waiting:
                self._guard(kind, self.group.rank, destination, waiting.popleft()[1].wait)
        assert not any(self._own.values()), "a message from this rank to itself was never received"

    def hear(self, kind: str, source: int) -> None:
        """Wait for the promise of `source`, if this step's has not been heard, and compare it with what is expected here."""
        if self._heard.get(source) is None:
            return
        theirs, work = self._heard[source]
        self._guard(kind, source, self.group.rank, work.wait)
        self._heard[source] = None
        if words := difference(self._promise, theirs):
            ranks, me = self.group.ranks, self.group.rank
            raise CommunicationError(
                f"rank {ranks[me]} (pipeline position {me}) and rank {ranks[source]} (position {source}), which sends "
                f"{WORDS[kind]} to it, disagree: {words}. All stages must divide the same batch in the same way and use one "
                "dtype: look for a rank with other data, another sequence length, micro-batch size or precision.")

    @property
    def num_waiting(self) -> int:
        """Sent messages that are still held, as far as known."""
        return sum(not work.is_completed() for waiting in self._sent.values() for _, work in waiting)

    @property
    def _transport(self):
        assert self.group.transport is not None, f"{self.group} has no transport: it has only one rank"
        return self.group.transport

    def _start(self, kind, destination, chunk, tensor, tag):
        waiting = self._sent[kind, destination, chunk]
        while waiting and waiting[0][1].is_completed():
            waiting.popleft()
        work = self._guard(kind, self.group.rank, destination, lambda: self._transport.isend(tensor, destination, tag))
        waiting.append((tensor, work))

    def _guard(self, kind, source, destination, call):
        try:
            return call()
        except CommunicationError as error:
            ranks, me = self.group.ranks, self.group.rank
            raise CommunicationError(
                f"rank {ranks[me]} (pipeline position {me}) was {'sending' if me == source else 'waiting for'} "
                f"{WORDS[kind]} from rank {ranks[source]} to rank {ranks[destination]}: {error}") from error


class Pending:
    """A receive under way."""

    __slots__ = ("_channels", "_kind", "_source", "_tensor", "_work", "_take")

    def __init__(self, channels, kind, source, tensor, work, take=None):
        self._channels, self._kind, self._source = channels, kind, source
        self._tensor, self._work, self._take = tensor, work, take

    def wait(self) -> torch.Tensor:
        """The message. Raises CommunicationError naming sender, receiver and kind when it does not come in time."""
        if self._take is not None:
            return self._take()
        self._channels.hear(self._kind, self._source)
        self._channels._guard(self._kind, self._source, self._channels.group.rank, self._work.wait)
        return self._tensor


@lru_cache(maxsize=4096)
def _tag(kind: str, chunk: int, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Odd for gradients, even for activations; see the note above."""
    return 2 + _KINDS[kind] + 2 * (zlib.crc32(repr((chunk, shape, dtype)).encode()) % (LAST_TAG // 2 - 1))
