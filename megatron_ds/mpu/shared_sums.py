"""`SharedSums`: reductions of tensors that lie in memory which the ranks of one host share.

Each rank reads its piece of the other ranks' tensors where they lie, and adds the pieces in rank order: the
bits of a reduction by messages (gloo.py), without sending or receiving them. An all-reduce then copies the
other pieces of the sum in the same way.

    rank 0   |- READY -|......|- adds piece 0 -|- DONE -|...
    rank 1        |- READY -|....|- adds piece 1 -|- DONE -|      two signals a rank and round

READY carries where the tensor is in the rank's shared memory, which differs between ranks. Rounds are
completed in the order in which they start: when one is waited for, or earlier, when another one starts or in
`progress`, if all parts are there. So a rank that is ahead seldom waits, and no thread is needed.

A tensor may be overwritten when all others have sent DONE. A reduce-scatter does not wait for that: its
`wait` may be in the middle of a backward, and another rank, which has nothing to wait for there (experts
without tokens), may be in a collective in which it waits for this one. `is_read` asks and `settle` waits. An
all-reduce, for which all ranks wait at one place of the program, waits itself.

Note: waiting. The second round of an all-reduce starts in `wait`. All ranks must wait for their operations in
the order in which they start them, which must be the same on all.
"""

from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch

from ..host.memory_maps import SharedPages

_READY, _DONE = 0, 1


class Signals(Protocol):
    """Short messages between ranks, in order; `SignalPipes`, or queues of threads in tests."""

    def send(self, peer: int, signal: tuple[int, int]) -> None:
        """Send to a peer; does not wait. Raises ConnectionError if it has ended."""

    def receive(self, peer: int) -> tuple[int, int]:
        """The next signal of a peer. Raises ConnectionError if it has ended, TimeoutError."""

    def take(self, peer: int) -> tuple[int, int] | None:
        """The next signal of a peer, None if there is none now. Raises ConnectionError."""


class SharedSums:
    """The reductions of one rank in one group.

    memory     of the group, in which the tensors are
    translate  makes the error that is raised from (what failed, the cause)
    rounds     that have started
    """

    def __init__(self, rank: int, size: int, memory: SharedPages, signals: Signals,
                 translate: Callable[[str, OSError], Exception]):
        self._rank, self._size, self._memory = rank, size, memory
        self._signals, self._translate = signals, translate
        self._others = [peer for peer in range(size) if peer != rank]
        self._ready: dict[int, deque[int]] = {peer: deque() for peer in self._others}      # starts of tensors
        self._done = dict.fromkeys(self._others, 0)             # rounds that each other has read
        self._last: dict[int, int] = {}                         # start of a tensor → its last round
        self._waiting: deque[Round] = deque()
        self.rounds = 0

    def can_sum(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is in this rank's shared memory; then those of the other ranks must be, too."""
        return self._memory.start_of(tensor) is not None

    def is_read(self, tensor: torch.Tensor) -> bool:
        """Whether no other rank reads a tensor any more; does not wait."""
        with _Translated(self._translate):
            for peer in self._others:
                while (signal := self._signals.take(peer)) is not None:
                    self._note(peer, signal)
        return min(self._done.values()) >= self._last.get(self._memory.start_of(tensor), 0)

    def settle(self, rounds: int | None = None) -> None:
        """Return when the first `rounds` (None: all) are complete here and the other ranks have read their
        tensors. Collective."""
        number = self.rounds if rounds is None else rounds
        with _Translated(self._translate):
            while self._waiting and self._waiting[0].number <= number:
                self._wait_for_first()
            for peer in self._others:
                while self._done[peer] < number:
                    self._note(peer, self._signals.receive(peer))

    def reduce_scatter(self, out: torch.Tensor, tensor: torch.Tensor) -> "Round":
        """As in `Transport`, of the sum, but for when the tensor may be overwritten."""
        return self._start(tensor, lambda parts: self._add(parts, tensor, out))

    def all_reduce(self, tensor: torch.Tensor) -> "AllReduce":
        """As in `Transport`, of the sum."""
        flat = tensor.view(-1)
        mine = flat.tensor_split(self._size)[self._rank]
        return AllReduce(self, self.reduce_scatter(mine, flat), lambda: self._start(flat, copier(flat)))

    def progress(self) -> None:
        """Complete the rounds whose parts are there; does not wait."""
        with _Translated(self._translate):
            while self._waiting and self._have_parts():
                self._complete_first()

    def complete(self, begun: "Round") -> None:
        """Return when a round is complete."""
        with _Translated(self._translate):
            while not begun.is_complete:
                self._wait_for_first()

    def _start(self, tensor: torch.Tensor, read: Callable[[dict[int, torch.Tensor]], None]) -> "Round":
        """read: called with the tensors of the other ranks."""
        self.progress()
        self.rounds += 1
        begun, start = Round(self, self.rounds, tensor, read), self._memory.start_of(tensor)
        self._last[start] = self.rounds
        with _Translated(self._translate):
            for peer in self._others:
                self._signals.send(peer, (_READY, start))
        self._waiting.append(begun)
        return begun

    def _wait_for_first(self) -> None:
        for peer in self._others:
            while not self._ready[peer]:
                self._note(peer, self._signals.receive(peer))
        self._complete_first()

    def _have_parts(self) -> bool:
        for peer in self._others:
            while not self._ready[peer]:
                signal = self._signals.take(peer)
                if signal is None:
                    return False
                self._note(peer, signal)
        return True

    def _note(self, peer: int, signal: tuple[int, int]) -> None:
        kind, start = signal
        if kind == _READY:
            self._ready[peer].append(start)
        else:
            self._done[peer] += 1

    def _complete_first(self) -> None:
        """Read the tensors of the first round that waits; all are there."""
        begun = self._waiting.popleft()
        starts = {peer: self._ready[peer].popleft() for peer in self._others}
        begun.read_from({peer: self._memory.view(peer, start, begun.nbytes)
                         for peer, start in starts.items()})
        for peer, start in starts.items():
            self._signals.send(peer, (_DONE, 0))
            self._memory.drop(peer, start)

    def _add(self, theirs: dict[int, torch.Tensor], tensor: torch.Tensor, out: torch.Tensor) -> None:
        """p0 + p1 + … of the pieces of this rank into `out`, which may be its own piece."""
        wholes = [theirs[peer].view(tensor.dtype) if peer in theirs else tensor for peer in range(self._size)]
        parts = [whole.tensor_split(self._size)[self._rank] for whole in wholes]
        total = torch.add(parts[0], parts[1], out=out if self._size == 2 else None)
        for i, part in enumerate(parts[2:], start=2):
            torch.add(total, part, out=out if i == self._size - 1 else total)


def copier(tensor: torch.Tensor) -> Callable[[dict[int, torch.Tensor]], None]:
    """A function that copies piece i of the tensor of each other rank i into `tensor`."""
    def read(theirs: dict[int, torch.Tensor]) -> None:
        size = len(theirs) + 1
        for peer, whole in theirs.items():
            tensor.tensor_split(size)[peer].copy_(whole.view(tensor.dtype).tensor_split(size)[peer])
    return read


class Round:
    """A `Work`: one reading of the other ranks' tensors, which has begun."""

    __slots__ = ("_sums", "number", "nbytes", "_keeps", "_read")

    def __init__(self, sums: SharedSums, number: int, tensor: torch.Tensor,
                 read: Callable[[dict[int, torch.Tensor]], None]):
        self._sums, self.number, self.nbytes = sums, number, tensor.nbytes
        self._keeps, self._read = tensor, read

    @property
    def is_complete(self) -> bool:
        """Whether the results are there."""
        return self._read is None

    def read_from(self, theirs: dict[int, torch.Tensor]) -> None:
        """theirs: the bytes of the other ranks' tensors."""
        self._read(theirs)
        self._read = None

    def wait(self) -> None:
        """Return when results may be read."""
        if self._sums is not None:
            self._sums.complete(self)
            self._sums = self._keeps = None

    def is_completed(self) -> bool:
        """Whether it was waited for."""
        return self._sums is None


class AllReduce:
    """A `Work` of two rounds."""

    __slots__ = ("_sums", "_first", "_second")

    def __init__(self, sums: SharedSums, first: Round, second: Callable[[], Round]):
        self._sums, self._first, self._second = sums, first, second

    def wait(self) -> None:
        """Wait for the sum of this rank's piece, then for the other pieces. Collective."""
        if self._second is not None:
            self._first.wait()
            self._sums.settle(self._first.number)       # the copies overwrite what others have read
            second, self._second = self._second(), None
            second.wait()
            self._sums.settle(second.number)

    def is_completed(self) -> bool:
        """Whether it was waited for."""
        return self._second is None


class _Translated:
    """Context that turns errors of signals into those of the group."""

    __slots__ = ("_translate",)

    def __init__(self, translate: Callable[[str, OSError], Exception]):
        self._translate = translate

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        if isinstance(error, ConnectionError | TimeoutError):
            raise self._translate("a reduction in shared memory", error) from error
