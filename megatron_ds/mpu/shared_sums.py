"""`SharedSums`: reductions of tensors that lie in memory which the ranks of one host share.

Each rank reads its piece of the other ranks' tensors where they lie, and adds the pieces in rank order: the
bits of a reduction by messages (gloo.py), without sending or receiving them. An all-reduce then copies the
other pieces of the sum in the same way.

    rank 0   |- READY -|......|- adds piece 0 -|- DONE -|...
    rank 1        |- READY -|....|- adds piece 1 -|- DONE -|      two signals a rank and round

READY carries the number of the round, where the tensor is in the rank's shared memory, which differs
between ranks, and its bytes, which do not. A round is completed when it is waited for, or earlier, when
another one starts or in `progress`, if all parts are there. So a rank that is ahead seldom waits, and no
thread is needed.

A tensor may be overwritten when all others have sent DONE. A reduce-scatter does not wait for that: its
`wait` may be in the middle of a backward, and another rank, which has nothing to wait for there (experts
without tokens), may be in a collective in which it waits for this one. `is_read` asks and `settle` waits. An
all-reduce, for which all ranks wait at one place of the program, waits itself.

Note: order. All ranks start the same operations in the same order, from which the numbers follow, and wait
for them in that order: the second round of an all-reduce starts in `wait`.
"""

import time
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import torch

from ..host.shared_pages import SharedPages
from ..host.signal_pipes import Signal

_WHAT = "a reduction in shared memory"
# a signal: kind, number of the round, start, bytes of the tensor
_READY = 0
_DONE = 1


class Signals(Protocol):
    """Short messages between ranks, in order; `SignalPipes`, or queues of threads in tests."""

    def send(self, peer: int, signal: Signal) -> None:
        """Send to a peer; does not wait. Raises ConnectionError if it has ended."""

    def receive(self, peer: int) -> Signal:
        """Return the next signal of a peer. Raises ConnectionError if it has ended, TimeoutError."""

    def take(self, peer: int, wait_seconds: float = 0.0) -> Signal | None:
        """Return the next signal of a peer, None if there is none within the time. Raises ConnectionError."""


class SharedSums:
    """The reductions of one rank in one group.

    rank       the position of this one in `ranks`, the global ranks of the group
    memory     of the group, in which the tensors are
    translate  makes the error that is raised from (what failed, the cause)
    rounds     that have started
    """

    def __init__(
        self,
        rank: int,
        ranks: Sequence[int],
        memory: SharedPages,
        signals: Signals,
        translate: Callable[[str, Exception], Exception],
    ):
        self._rank = rank
        self._ranks = ranks
        self._size = len(ranks)
        self._memory = memory
        self._signals = signals
        self._translate = translate
        self._others = [peer for peer in range(self._size) if peer != rank]
        self._ready: dict[
            int, dict[int, tuple[int, int]]
        ] = {}  # number of a round → rank → start, bytes
        self._waiting: dict[int, Round] = {}  # not complete here
        self._unread: dict[
            int, set[int]
        ] = {}  # number of a round → ranks that have not read it
        self._last: dict[int, int] = {}  # start of a tensor → its last round
        self.rounds = 0

    def can_sum(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is in this rank's shared memory; then those of the other ranks must be, too."""
        return self._memory.start_of(tensor) is not None

    def is_read(self, tensor: torch.Tensor, wait_seconds: float = 0.0) -> bool:
        """Return whether no other rank reads a tensor any more, within the time."""
        number = self._last.get(self._start_of(tensor), -1)
        deadline = time.monotonic() + wait_seconds
        with Translated(self._translate, _WHAT):
            self._take_signals()
            while (peers := self._unread.get(number)) and (
                left := deadline - time.monotonic()
            ) > 0:
                peer = min(peers)
                if (signal := self._signals.take(peer, left)) is not None:
                    self._note(peer, signal)
        return number not in self._unread

    def settle(self) -> None:
        """Return when all rounds are complete, here and on the other ranks. Collective."""
        with Translated(self._translate, _WHAT):
            for number in sorted(self._waiting):
                self._complete(number)
            self._until_none(lambda: next(iter(self._unread.values()), ()))

    def reduce_scatter(self, out: torch.Tensor, tensor: torch.Tensor) -> "Round":
        """Sum flat [numel] over all ranks; each keeps its [numel / n] in `out`.

        `tensor` may be overwritten after `Round.wait_until_read`.
        """
        self.rounds += 1
        return self._start(
            self.rounds, tensor, lambda theirs: self._add(theirs, tensor, out)
        )

    def all_reduce(self, tensor: torch.Tensor) -> "AllReduce":
        """Sum the contiguous tensor over all ranks, in place."""
        flat = tensor.view(-1)
        first = self.reduce_scatter(flat.tensor_split(self._size)[self._rank], flat)
        self.rounds += 1
        number = self.rounds
        return AllReduce(first, lambda: self._start(number, flat, copier(flat)))

    def progress(self) -> None:
        """Complete the rounds whose parts are there; does not wait."""
        if not self._waiting:
            return
        with Translated(self._translate, _WHAT):
            self._take_signals()
            for number in [
                number for number in sorted(self._waiting) if not self._missing(number)
            ]:
                self._complete(number)

    def complete(self, number: int) -> None:
        """Return when a round is complete here."""
        with Translated(self._translate, _WHAT):
            if number in self._waiting:
                self._complete(number)

    def wait_until_read(self, number: int) -> None:
        """Return when the other ranks have completed a round."""
        with Translated(self._translate, _WHAT):
            self._until_none(lambda: self._unread.get(number, ()))

    def _start(
        self,
        number: int,
        tensor: torch.Tensor,
        read: Callable[[dict[int, torch.Tensor]], None],
    ) -> "Round":
        """read: called with the tensors of the other ranks, as bytes."""
        self.progress()
        begun = Round(self, number, tensor, read)
        start = self._start_of(tensor)
        self._last[start], self._unread[number] = number, set(self._others)
        self._waiting[number] = begun
        with Translated(self._translate, _WHAT):
            for peer in self._others:
                self._signals.send(peer, (_READY, number, start, tensor.nbytes))
        return begun

    def _start_of(self, tensor: torch.Tensor) -> int:
        start = self._memory.start_of(tensor)
        assert start is not None, "`can_sum` was asked"
        return start

    def _complete(self, number: int) -> None:
        """Wait for the tensors of a round and read them."""
        self._until_none(lambda: self._missing(number))
        begun = self._waiting[number]
        tensor = begun.tensor
        read = begun.read
        assert tensor is not None and read is not None, "a round is completed once"
        places = self._ready[number]
        nbytes = tensor.nbytes
        # Views of other sizes would read past the tensor of a peer.
        for peer, (_, theirs) in places.items():
            if theirs != nbytes:
                raise self._translate(
                    _WHAT,
                    ValueError(
                        f"rank {self._ranks[peer]} adds {theirs} bytes where rank {self._ranks[self._rank]} adds "
                        f"{nbytes}: the ranks reduce different tensors"
                    ),
                )
        read(
            {
                peer: self._memory.view(peer, places[peer][0], nbytes)
                for peer in self._others
            }
        )
        del self._waiting[number], self._ready[number]
        for peer in self._others:
            self._signals.send(peer, (_DONE, number, 0, 0))
            self._memory.drop(peer, places[peer][0])

    def _missing(self, number: int) -> list[int]:
        """Return the ranks that have not started a round yet."""
        there = self._ready.get(number, ())
        return [peer for peer in self._others if peer not in there]

    def _until_none(self, missing: Callable[[], Collection[int]]) -> None:
        """Wait for signals of the ranks that are missing until none is."""
        while peers := missing():
            peer = min(peers)
            self._note(peer, self._signals.receive(peer))

    def _take_signals(self) -> None:
        for peer in self._others:
            while (signal := self._signals.take(peer)) is not None:
                self._note(peer, signal)

    def _note(self, peer: int, signal: Signal) -> None:
        kind, number, *place = signal
        if kind == _READY:
            start, nbytes = place
            self._ready.setdefault(number, {})[peer] = start, nbytes
            return
        self._unread[number].discard(peer)
        if not self._unread[number]:
            del self._unread[number]

    def _add(
        self, theirs: dict[int, torch.Tensor], tensor: torch.Tensor, out: torch.Tensor
    ) -> None:
        """p0 + p1 + … of the pieces of this rank into `out`, which may be its own piece."""
        wholes = [
            theirs[peer].view(tensor.dtype) if peer in theirs else tensor
            for peer in range(self._size)
        ]
        parts = [whole.tensor_split(self._size)[self._rank] for whole in wholes]
        total = torch.add(parts[0], parts[1], out=out if self._size == 2 else None)
        for i, part in enumerate(parts[2:], start=2):
            torch.add(total, part, out=out if i == self._size - 1 else total)


def copier(tensor: torch.Tensor) -> Callable[[dict[int, torch.Tensor]], None]:
    """Return a function that copies piece i of the tensor of each other rank i into `tensor`."""

    def read(theirs: dict[int, torch.Tensor]) -> None:
        size = len(theirs) + 1
        for peer, whole in theirs.items():
            tensor.tensor_split(size)[peer].copy_(
                whole.view(tensor.dtype).tensor_split(size)[peer]
            )

    return read


class Round:
    """A `Work`: one reading of the other ranks' tensors, which has begun."""

    __slots__ = ("_sums", "number", "tensor", "read")

    def __init__(
        self,
        sums: SharedSums,
        number: int,
        tensor: torch.Tensor,
        read: Callable[[dict[int, torch.Tensor]], None],
    ):
        self._sums = sums
        self.number = number
        self.tensor: torch.Tensor | None = tensor
        self.read: Callable[[dict[int, torch.Tensor]], None] | None = read

    def wait(self) -> None:
        """Return when results may be read."""
        if self.read is not None:
            self._sums.complete(self.number)
            self.tensor = self.read = None

    def wait_until_read(self) -> None:
        """Return when the tensor may be overwritten. Collective."""
        self.wait()
        self._sums.wait_until_read(self.number)

    def is_completed(self) -> bool:
        """Return whether it was waited for."""
        return self.read is None


class AllReduce:
    """A `Work` of two rounds."""

    __slots__ = ("_first", "_second")

    def __init__(self, first: Round, second: Callable[[], Round]):
        self._first = first
        self._second: Callable[[], Round] | None = second

    def wait(self) -> None:
        """Wait for the sum of this rank's piece, then for the other pieces. Collective."""
        if self._second is not None:
            self._first.wait_until_read()  # the copies overwrite what others have read
            second = self._second()
            self._second = None
            second.wait_until_read()

    def is_completed(self) -> bool:
        """Return whether it was waited for."""
        return self._second is None


class Translated:
    """Context that turns errors of signals into those of the group. what: failed."""

    __slots__ = ("_translate", "_what")

    def __init__(self, translate: Callable[[str, Exception], Exception], what: str):
        self._translate = translate
        self._what = what

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        if isinstance(error, ConnectionError | TimeoutError):
            raise self._translate(self._what, error) from error
