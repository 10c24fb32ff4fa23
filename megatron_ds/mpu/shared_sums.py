"""`SharedSums`: reduce-scatters of tensors that lie in memory which the ranks of one host share.

Each rank reads its piece of the other ranks' tensors where they lie, and adds the pieces in rank order: the
bits of a reduce-scatter by messages (gloo.py), without sending or receiving them.

    rank 0   |- READY -|......|- adds piece 0 -|- DONE -|...
    rank 1        |- READY -|....|- adds piece 1 -|- DONE -|      two signals a rank and reduction

READY carries where the tensor is in the rank's shared memory, which differs between ranks. A tensor may be
overwritten when all others have sent DONE: `wait` returns then. Reductions are completed in the order in
which they start: when one is waited for, or earlier, when another one starts or in `progress`, if all parts
are there. A rank that is ahead thus seldom waits, and no thread is needed.
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
        """Send to a peer; does not wait."""

    def receive(self, peer: int) -> tuple[int, int]:
        """The next signal of a peer. Raises OSError if it has ended or does not answer."""

    def take(self, peer: int) -> tuple[int, int] | None:
        """The next signal of a peer, None if there is none now. Raises OSError if it has ended."""


class SharedSums:
    """The reductions of one rank in one group.

    memory     of the group, in which the tensors are
    translate  makes the error that is raised from (what failed, the cause)
    """

    def __init__(self, rank: int, size: int, memory: SharedPages, signals: Signals,
                 translate: Callable[[str, OSError], Exception]):
        self._rank, self._size, self._memory = rank, size, memory
        self._signals, self._translate = signals, translate
        self._others = [peer for peer in range(size) if peer != rank]
        self._ready: dict[int, deque[int]] = {peer: deque() for peer in self._others}      # starts of tensors
        self._done = dict.fromkeys(self._others, 0)             # reductions that each other has read
        self._waiting: deque[SharedSum] = deque()               # not added yet
        self._started = 0

    def start_of(self, tensor: torch.Tensor) -> int | None:
        """The first byte of a tensor in this rank's shared memory; None if it is elsewhere."""
        return self._memory.start_of(tensor)

    def reduce_scatter(self, out: torch.Tensor, tensor: torch.Tensor) -> "SharedSum":
        """As in `Transport`, of the sum. `tensor` is in the shared memory."""
        self.progress()
        self._started += 1
        start = self._memory.start_of(tensor)
        with self._translated("a reduce-scatter in shared memory"):
            for peer in self._others:
                self._signals.send(peer, (_READY, start))
        begun = SharedSum(self, self._started, out, tensor)
        self._waiting.append(begun)
        return begun

    def progress(self) -> None:
        """Complete the reductions whose parts are there; does not wait."""
        with self._translated("a reduce-scatter in shared memory"):
            while self._waiting and self._have_parts():
                self._add()

    def complete(self, begun: "SharedSum") -> None:
        """Return when a reduction is added and no other rank reads its tensor any more."""
        with self._translated("a reduce-scatter in shared memory"):
            while not begun.is_added:
                for peer in self._others:
                    while not self._ready[peer]:
                        self._note(peer, self._signals.receive(peer))
                self._add()
            for peer in self._others:
                while self._done[peer] < begun.number:
                    self._note(peer, self._signals.receive(peer))

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

    def _add(self) -> None:
        """p0 + p1 + … of the first reduction that waits; all parts are there."""
        begun = self._waiting.popleft()
        mine, whole = begun.tensor.chunk(self._size)[self._rank], begun.tensor
        parts = [mine if peer == self._rank else self._part(peer, mine, whole.nbytes)
                 for peer in range(self._size)]
        total = torch.add(parts[0], parts[1], out=begun.out if self._size == 2 else None)
        for i, part in enumerate(parts[2:], start=2):
            torch.add(total, part, out=begun.out if i == self._size - 1 else total)
        for peer in self._others:
            self._signals.send(peer, (_DONE, 0))
        begun.forget()

    def _part(self, peer: int, mine: torch.Tensor, nbytes: int) -> torch.Tensor:
        whole = self._memory.view(peer, self._ready[peer].popleft(), nbytes)
        return whole.view(mine.dtype).chunk(self._size)[self._rank]

    def _translated(self, what: str) -> "_Translated":
        return _Translated(self._translate, what)


class SharedSum:
    """A `Work`: a reduction that has begun."""

    __slots__ = ("_sums", "number", "out", "tensor", "is_added")

    def __init__(self, sums: SharedSums, number: int, out: torch.Tensor, tensor: torch.Tensor):
        self._sums, self.number, self.out, self.tensor, self.is_added = sums, number, out, tensor, False

    def wait(self) -> None:
        """Return when `out` may be read and `tensor` overwritten."""
        if self._sums is not None:
            self._sums.complete(self)
            self._sums = None

    def is_completed(self) -> bool:
        """Whether it was waited for."""
        return self._sums is None

    def forget(self) -> None:
        """The sum is in `out`; drop the tensors."""
        self.is_added, self.out, self.tensor = True, None, None


class _Translated:
    """Context that turns errors of signals into those of the group."""

    __slots__ = ("_translate", "_what")

    def __init__(self, translate: Callable[[str, OSError], Exception], what: str):
        self._translate, self._what = translate, what

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        if isinstance(error, ConnectionError | TimeoutError):
            raise self._translate(self._what, error) from error
