"""`Channels`: activations and gradients between the ranks of a pipeline, each stream in its own order.

A channel is (source, destination, kind, chunk). Messages of one channel arrive in the order in which they were sent; between
channels there is no order, so a pipeline schedule needs no agreement on when a send meets a receive, only on the order of
each stream. Sends return at once and keep their tensor until it is gone; receives are posted at once.
"""

from collections import defaultdict, deque

import torch

from ..errors import CommunicationError
from .group import Group, Work

_KINDS = {"act": 0, "grad": 1}
WORDS = {"act": "an activation", "grad": "a gradient"}


class Channels:
    """The channels of one rank. Destinations and sources are positions in `group`, the rank's own included."""

    def __init__(self, group: Group):
        self.group = group
        self._sent: dict[tuple, deque[tuple[torch.Tensor, Work]]] = defaultdict(deque)
        self._own: dict[int, deque[torch.Tensor]] = defaultdict(deque)

    def send(self, kind: str, destination: int, tensor: torch.Tensor, chunk: int = 0) -> None:
        """Start sending `tensor`, which must not change until it has arrived. `kind` is "act" or "grad"."""
        tensor, tag = tensor.detach().contiguous(), _tag(kind, chunk)
        if destination == self.group.rank:
            self._own[tag].append(tensor)
            return
        self.group.traffic.add("send", self.group.axes, self.group.size, tensor.numel() * tensor.element_size())
        waiting = self._sent[kind, destination, chunk]
        while waiting and waiting[0][1].is_completed():
            waiting.popleft()
        work = self._guard(kind, self.group.rank, destination, lambda: self._transport.isend(tensor, destination, tag))
        waiting.append((tensor, work))

    def recv(self, kind: str, source: int, shape: tuple[int, ...], dtype: torch.dtype,
             device: torch.device | str = "cpu", chunk: int = 0) -> "Pending":
        """Post the receive of the channel's next message. Shape and dtype are known beforehand; nothing is negotiated."""
        tag = _tag(kind, chunk)
        if source == self.group.rank:
            return Pending(self, kind, source, None, None, lambda: self._own[tag].popleft())
        tensor = torch.empty(shape, dtype=dtype, device=device)
        work = self._guard(kind, source, self.group.rank, lambda: self._transport.irecv(tensor, source, tag))
        return Pending(self, kind, source, tensor, work)

    def drain(self) -> None:
        """Return once every message sent from here has left. Call it at the end of a step."""
        for (kind, destination, _), waiting in self._sent.items():
            while waiting:
                self._guard(kind, self.group.rank, destination, waiting.popleft()[1].wait)
        assert not any(self._own.values()), "a message from this rank to itself was never received"

    @property
    def num_waiting(self) -> int:
        """Sent messages that are still held, as far as known."""
        return sum(not work.is_completed() for waiting in self._sent.values() for _, work in waiting)

    @property
    def _transport(self):
        assert self.group.transport is not None, f"{self.group} has nobody to talk to"
        return self.group.transport

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
        self._channels._guard(self._kind, self._source, self._channels.group.rank, self._work.wait)
        return self._tensor


def _tag(kind: str, chunk: int) -> int:
    return 2 * chunk + _KINDS[kind]
