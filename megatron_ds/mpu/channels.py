"""`Channels`: activations and gradients between the ranks of a pipeline, each stream in its own order.

A channel is (source, destination, kind, chunk). Messages of one channel arrive in the order in which they
were sent; between channels there is no order. So the ranks of a pipeline schedule must agree on the order of
each stream only, not on when a send meets its receive.

Note: what is under way. A send keeps its tensor until it has been received, and on a GPU the host, which runs
ahead, never sees that. So a channel holds two sends at most: before a third, it waits for the first. It holds
one posted receive: a second one would stand behind the first on the stream of the channel, at the head of a
hardware queue, where it would keep other streams from running. Before it posts a receive, it waits for the
one before. On a GPU the stream waits, not the host.

Note: two ranks that expect different tensors. Bytes received into a buffer of another shape are garbage, or
end the process. So the tag of a message depends on its shape and dtype: it never matches the receive of
another one. In addition ranks compare the shapes of each step (`ShapeCheck`), so that a receiver reports the
difference at once. Without this, ranks that divide a batch differently would wait for messages that never
arrive, until the timeout. Before its first message of a step to another rank, a rank sends it the shapes and
the dtype of all the step's micro-batches, in a message of fixed length; the receiver compares them with its
own. Runs of shapes that do not fit into the message are compared by the checksum alone.

    | micro-batches | dtype | CRC-32 of all shapes | runs | of each run of equal shapes: length, dims, sizes |
"""

import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import chain, groupby
from typing import TypeVar

import torch

from ..errors import CommunicationError
from .group import Group, TrafficLog, Transport, Work
from .own_channels import OwnChannels, Posted

T = TypeVar("T")

_KINDS = {"act": 0, "grad": 1}
_NAMES = {"act": "an activation", "grad": "a gradient"}
Channel = tuple[str, int, int]  # kind, peer, chunk
MOST_SENDS = 2  # of a channel
SHAPES = -1  # in place of the chunk, for the message of the shape check
SHAPES_TAG = 0  # of the shape check; those of activations and gradients follow
LAST_TAG = (1 << 16) - 1  # transports use higher tags themselves


class Channels(OwnChannels):
    """The channels of one rank of several."""

    def __init__(self, group: Group):
        super().__init__(group)
        self._sent: dict[tuple, deque[tuple[torch.Tensor, Work]]] = defaultdict(deque)
        self._posted: dict[Channel, Pending] = {}  # those not waited for yet
        self._check = ShapeCheck()

    def announce(self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> None:
        self._check.start(shapes, dtype)

    def send(
        self, kind: str, destination: int, tensor: torch.Tensor, chunk: int = 0
    ) -> None:
        if destination == self.group.rank:
            super().send(kind, destination, tensor, chunk)
            return
        tensor = tensor.detach().contiguous()
        self._check.announce(
            destination,
            lambda message: self._start(
                (kind, destination, SHAPES), message, SHAPES_TAG
            ),
        )
        self.group.traffic.add("send", self.group.axes, self.group.size, tensor.nbytes)
        tag = _tag(kind, chunk, tuple(tensor.shape), tensor.dtype)
        log = self.group.traffic.log
        self._start((kind, destination, chunk), tensor, tag, log)

    def recv(
        self,
        kind: str,
        source: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        chunk: int = 0,
    ) -> Posted:
        if source == self.group.rank:
            return super().recv(kind, source, shape, dtype, device, chunk)
        # One receive of a channel at a time.
        channel = (kind, source, chunk)
        if channel in self._posted:
            self._posted[channel].wait()
        self._check.expect(
            source, lambda message: self._receive(kind, source, message, SHAPES_TAG)
        )
        # Post it.
        tensor = torch.empty(shape, dtype=dtype, device=device)
        work = self._receive(
            kind, source, tensor, _tag(kind, chunk, tuple(shape), dtype)
        )
        self._posted[channel] = Pending(self, channel, tensor, work)
        return self._posted[channel]

    def drain(self) -> None:
        for channel, waiting in self._sent.items():
            while waiting:
                self._let_go(channel)
        super().drain()

    def verify(self, kind: str, source: int) -> None:
        """Compare the shapes of the step with those of `source`, once a step. Raises CommunicationError."""
        wait = lambda work: self._guard(kind, source, self.group.rank, work.wait)
        if difference := self._check.verify(source, wait):
            ranks = self.group.ranks
            me = self.group.rank
            raise CommunicationError(
                f"rank {ranks[me]} (pipeline position {me}) receives {_NAMES[kind]} from rank "
                f"{ranks[source]} (position {source}), but the shapes of their steps differ: {difference}. "
                "All stages must divide the same batch in the same way and use one dtype. Look for a rank "
                "with other data, another sequence length, micro-batch size or precision."
            )

    @property
    def num_waiting(self) -> int:
        """Messages whose tensors are still held because their sends are not known to be complete."""
        waiting = chain.from_iterable(self._sent.values())
        return sum(not work.is_completed() for _, work in waiting)

    @property
    def _transport(self) -> Transport:
        assert self.group.transport is not None, (
            f"{self.group} has no transport: it has only one rank"
        )
        return self.group.transport

    def _start(
        self,
        channel: Channel,
        tensor: torch.Tensor,
        tag: int,
        log: TrafficLog | None = None,
    ) -> None:
        waiting = self._sent[channel]
        while waiting and waiting[0][1].is_completed():
            waiting.popleft()
        while len(waiting) >= MOST_SENDS:
            self._let_go(channel)
        kind, destination, _ = channel
        begin = lambda: self._transport.isend(tensor, destination, tag)
        if log is not None:
            begin = partial(log.start, "send", self.group, tensor.nbytes, begin)
        work = self._guard(kind, self.group.rank, destination, begin)
        waiting.append((tensor, work))

    def _let_go(self, channel: Channel) -> None:
        """Wait for the oldest send of a channel and free its tensor."""
        kind, destination, _ = channel
        _, work = self._sent[channel][0]
        self._guard(kind, self.group.rank, destination, work.wait)
        self._sent[channel].popleft()

    def _finish(self, channel: Channel, work: Work) -> None:
        """Wait for the posted receive of a channel."""
        kind, source, _ = channel
        self.verify(kind, source)
        self._guard(kind, source, self.group.rank, work.wait)
        del self._posted[channel]

    def _receive(self, kind: str, source: int, tensor: torch.Tensor, tag: int) -> Work:
        return self._guard(
            kind,
            source,
            self.group.rank,
            lambda: self._transport.irecv(tensor, source, tag),
        )

    def _guard(
        self, kind: str, source: int, destination: int, call: Callable[[], T]
    ) -> T:
        """`call()`, with both ranks and the kind of message added to its CommunicationError."""
        try:
            return call()
        except CommunicationError as error:
            ranks = self.group.ranks
            me = self.group.rank
            raise CommunicationError(
                f"rank {ranks[me]} (pipeline position {me}) was "
                f"{'sending' if me == source else 'waiting for'} {_NAMES[kind]} from "
                f"rank {ranks[source]} to rank {ranks[destination]}: {error}"
            ) from error


class Pending:
    """A receive that has been posted."""

    __slots__ = ("_channels", "_channel", "_tensor", "_work")

    def __init__(
        self,
        channels: Channels,
        channel: Channel,
        tensor: torch.Tensor,
        work: Work,
    ):
        self._channels = channels
        self._channel = channel
        self._tensor = tensor
        self._work: Work | None = work

    def wait(self) -> torch.Tensor:
        """Return the message. Raises CommunicationError when it does not arrive in time."""
        if self._work is not None:
            self._channels._finish(self._channel, self._work)
            self._work = None
        return self._tensor


@lru_cache(maxsize=4096)
def _tag(kind: str, chunk: int, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Odd for gradients, even for activations, so that a transport can separate the two streams."""
    return (
        2
        + _KINDS[kind]
        + 2 * (zlib.crc32(repr((chunk, shape, dtype)).encode()) % (LAST_TAG // 2 - 1))
    )


DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
MOST_RUNS = 12
MOST_SIZES = 4
HEADER = 4
RUN = 2 + MOST_SIZES


class ShapeCheck:
    """The exchange of one rank with its peers. Does nothing until `start` is called for the first time."""

    def __init__(self):
        self._expected: torch.Tensor | None = None
        self._announced: set[int] = set()  # peers that this step's message was sent to
        # peer → its message under way; None: verified
        self._received: dict[int, tuple[torch.Tensor, Work] | None] = {}

    def start(self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> None:
        """Begin a step. shapes: of the hidden states of each micro-batch."""
        self._expected = encode_shapes(shapes, dtype)
        self._announced = set()
        self._received = {}

    def announce(self, peer: int, send: Callable[[torch.Tensor], None]) -> None:
        """Send this step's message to `peer`, the first time only."""
        if self._expected is not None and peer not in self._announced:
            self._announced.add(peer)
            send(self._expected)

    def expect(self, peer: int, receive: Callable[[torch.Tensor], Work]) -> None:
        """Post the receive of this step's message of `peer`, the first time only."""
        if self._expected is not None and peer not in self._received:
            message = torch.empty_like(self._expected)
            self._received[peer] = message, receive(message)

    def verify(self, peer: int, wait: Callable[[Work], None]) -> str:
        """Wait for the message of `peer` and return how it differs from this rank's; "" if it does not.

        Returns "" at once where the step's message was not expected or was verified before.
        """
        posted = self._received.get(peer)
        if posted is None or self._expected is None:
            return ""
        message, work = posted
        wait(work)
        self._received[peer] = None
        return describe_difference(self._expected, message)


def encode_shapes(
    shapes: Sequence[tuple[int, ...]], dtype: torch.dtype
) -> torch.Tensor:
    """Return the message, int64 on the CPU; see above. shapes: of each micro-batch in turn."""
    shapes = [tuple(shape) for shape in shapes]
    assert all(len(shape) <= MOST_SIZES for shape in shapes), (
        f"hidden states have at most {MOST_SIZES} dimensions: {shapes}"
    )
    runs = [
        (len(list(same)), len(shape), *shape, *[0] * (MOST_SIZES - len(shape)))
        for shape, same in groupby(shapes)
    ]
    shown = runs[:MOST_RUNS]
    numbers = [
        len(shapes),
        DTYPES.index(dtype),
        zlib.crc32(repr(runs).encode()),
        len(shown),
        *sum(shown, ()),
    ]
    return torch.tensor(numbers + [0] * (HEADER + RUN * MOST_RUNS - len(numbers)))


def describe_difference(expected: torch.Tensor, received: torch.Tensor) -> str:
    """Return the first difference between two messages, for an error; "" if they are equal."""
    if torch.equal(expected, received):
        return ""
    (count, dtype, *_), (its_count, its_dtype, *_) = (
        expected.tolist(),
        received.tolist(),
    )
    if count != its_count:
        return (
            f"this rank's step has {count} micro-batches, the sender's has {its_count}"
        )
    names = [_name_of(dtype), _name_of(its_dtype)]
    for k, (shape, its_shape) in enumerate(zip(_shapes(expected), _shapes(received))):
        if shape != its_shape or dtype != its_dtype:
            return (
                f"micro-batch {k} was expected as {shape} {names[0]}, but the sender has {its_shape} "
                f"{names[1]}"
            )
    return f"a micro-batch after number {len(_shapes(expected)) - 1} has another shape than expected"


def _name_of(dtype: int) -> str:
    return (
        str(DTYPES[dtype]).removeprefix("torch.")
        if 0 <= dtype < len(DTYPES)
        else "an unknown dtype"
    )


def _shapes(message: torch.Tensor) -> list[list[int]]:
    """Return the shape of each micro-batch in the message, which stores consecutive equal shapes once."""
    _, _, _, num_runs, *numbers = message.tolist()
    shapes: list[list[int]] = []
    for i in range(num_runs):
        count, dimensions, *sizes = numbers[RUN * i : RUN * (i + 1)]
        shapes += [sizes[:dimensions]] * count
    return shapes
