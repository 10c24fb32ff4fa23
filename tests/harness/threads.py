"""Ranks as threads of one process: collectives in microseconds, no ports, a debugger that sees all ranks.

    results = run_ranks(4, lambda rank, world: my_test(rank, world.group("tp", (0, 1, 2, 3), rank)))

Every rank runs the function in a thread of its own with a `Transport` that hands tensors to the other threads
through queues. Who holds the baton runs, until it must wait for a message: threads that take the interpreter
from each other at every small operation spend a sixth of their time on that. A rank that waits is woken once
a message. The first exception of any rank is raised in the test; the others are woken up and end. Never
touches torch.distributed.
"""

import queue
import threading
from collections.abc import Callable

import torch

from megatron_ds.host.shared_pages import share_pages
from megatron_ds.mpu.group import DONE, AllOf, Group, Traffic
from tests.harness.limits import HUNG

_ABORTED = object()


class Baton:
    """The right to run, of one world's threads."""

    def __init__(self):
        self.held = threading.Lock()

    def take(self, mailbox, timeout: float):
        """What comes next in a queue; while there is nothing, another thread has the baton."""
        try:
            return mailbox.get_nowait()
        except queue.Empty:
            self.held.release()
        try:
            return mailbox.get(timeout=timeout)
        finally:
            self.held.acquire()


class ThreadWorld:
    """Meeting places of all groups, shared by the threads."""

    def __init__(self, size: int, shares_memory: bool = False, transport=None):
        self.size, self.shares_memory = size, shares_memory
        self._transport = transport or ThreadTransport
        self._lock, self.baton = threading.Lock(), Baton()
        self._rooms: dict[tuple, _Room] = {}
        self.traffic = [Traffic() for _ in range(size)]

    def group(self, axes: str, ranks: tuple[int, ...], rank: int) -> Group:
        """The group of `ranks`, seen from global rank `rank`, which must be one of them."""
        ranks = tuple(ranks)
        transport = self.connect(axes, [ranks], rank)
        return Group(axes, ranks, ranks.index(rank), transport, self.traffic[rank])

    def connect(
        self, axes: str, groups: list[tuple[int, ...]], rank: int
    ) -> "ThreadTransport | None":
        """What `Mesh` asks for: the transport of the group among `groups` that holds `rank`; None for a group
        of one."""
        ranks = next(tuple(g) for g in groups if rank in g)
        if len(ranks) == 1:
            return None
        with self._lock:
            room = self._rooms.setdefault(
                (axes, ranks), _Room(len(ranks), self.baton, self.shares_memory)
            )
        return self._transport(room, ranks.index(rank))

    def abort(self) -> None:
        with self._lock:
            for room in self._rooms.values():
                room.abort()


class _Room:
    def __init__(self, size: int, baton: Baton, shares_memory: bool):
        self.size, self.baton, self.shares_memory = size, baton, shares_memory
        self.is_aborted = False
        self._mail: dict[tuple[int, int, object], queue.SimpleQueue] = {}

    def abort(self) -> None:
        """Wake up all who wait here: a rank has failed."""
        self.is_aborted = True
        for mailbox in list(self._mail.values()):
            mailbox.put(_ABORTED)

    def mailbox(self, source: int, destination: int, tag: object) -> queue.SimpleQueue:
        # Not a defaultdict: two threads that miss a key together would make two queues, and a message be lost
        # in one.
        key = source, destination, tag
        return self._mail.get(key) or self._mail.setdefault(key, queue.SimpleQueue())

    def take(self, mailbox: queue.SimpleQueue):
        message = _ABORTED if self.is_aborted else self.baton.take(mailbox, HUNG)
        if message is _ABORTED:
            raise threading.BrokenBarrierError
        return message


class ThreadTransport:
    """`megatron_ds.mpu.group.Transport` among threads. Everything is synchronous; sums are in rank order on
    every rank."""

    def __init__(self, room: _Room, rank: int):
        self.room, self.rank, self.size = room, rank, room.size
        self.wait_seconds = HUNG
        others = [r for r in range(room.size) if r != rank]
        self._to = [room.mailbox(rank, other, "exchange") for other in others]
        self._from = {other: room.mailbox(other, rank, "exchange") for other in others}

    def _exchange(self, thing) -> list:
        """The object of every rank. All ranks share them, so no rank may write to one."""
        for mailbox in self._to:
            mailbox.put(thing)
        return [
            thing if r == self.rank else self.room.take(self._from[r])
            for r in range(self.size)
        ]

    def _reduced(self, tensor, op):
        stack = self._exchange(tensor.detach().clone())
        total = stack[0].clone()
        combine = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}[op]
        for t in stack[1:]:
            total = combine(total, t)
        return total

    def all_reduce(self, tensor, op):
        tensor.detach().copy_(self._reduced(tensor, op))
        return DONE

    def all_gather(self, out, tensor):
        out.detach().copy_(
            torch.cat([t.reshape(-1) for t in self._exchange(tensor.detach().clone())])
        )
        return DONE

    def reduce_scatter(self, out, tensor, op):
        out.detach().copy_(self._reduced(tensor, op).chunk(self.size)[self.rank])
        return DONE

    def all_to_all(self, out, tensor, sent=None, received=None):
        pieces = (
            tensor.detach()
            .clone()
            .split(list(sent or [len(tensor) // self.size] * self.size))
        )
        mine = [of_rank[self.rank] for of_rank in self._exchange(pieces)]
        assert received is None or [len(piece) for piece in mine] == list(received), (
            "another number of rows was sent"
        )
        out.detach().copy_(torch.cat(mine))
        return DONE

    def broadcast(self, tensor, source):
        tensor.detach().copy_(
            self._exchange(tensor.detach().clone() if self.rank == source else None)[
                source
            ]
        )
        return DONE

    def isend(self, tensor, destination, tag):
        self.room.mailbox(self.rank, destination, tag).put(tensor.detach().clone())
        return DONE

    def irecv(self, tensor, source, tag):
        return _Receive(tensor, self.room, self.room.mailbox(source, self.rank, tag))

    def exchange(self, sends, receives):
        for tensor, destination in sends:
            self.isend(tensor, destination, "exchanged")
        return AllOf(
            [self.irecv(tensor, source, "exchanged") for tensor, source in receives]
        )

    def all_gather_object(self, obj):
        return self._exchange(obj)

    def barrier(self):
        self._exchange(None)

    def share_memory(self):
        return (
            share_pages(self.rank, self._exchange) if self.room.shares_memory else None
        )

    def share_signals(self):
        return _ThreadSignals(self.room, self.rank)

    def failure(self, what, error):
        return error


class _ThreadSignals:
    def __init__(self, room, rank):
        self.room, self.rank = room, rank

    def send(self, peer, signal):
        self.room.mailbox(self.rank, peer, "signals").put(signal)

    def receive(self, peer):
        return self.room.take(self.room.mailbox(peer, self.rank, "signals"))

    def take(self, peer, wait_seconds=0.0):
        mailbox = self.room.mailbox(peer, self.rank, "signals")
        return None if mailbox.empty() else self.receive(peer)


class _Receive:
    def __init__(self, tensor, room, mailbox):
        self.tensor, self.room, self.mailbox = tensor, room, mailbox

    def wait(self):
        message = self.room.take(self.mailbox)
        assert (
            message.shape == self.tensor.shape and message.dtype == self.tensor.dtype
        ), (
            f"received {list(message.shape)} {message.dtype}, expected {list(self.tensor.shape)} "
            f"{self.tensor.dtype}"
        )
        self.tensor.detach().copy_(message)


def run_ranks(
    size: int,
    function: Callable[[int, ThreadWorld], object],
    shares_memory: bool = False,
    transport: Callable[["_Room", int], "ThreadTransport"] | None = None,
) -> list:
    """Run `function(rank, world)` on `size` threads; the results in rank order. Raises the first error of any
    rank.

    shares_memory: ranks can read each other's memory, as processes of one host can
    transport: (place where a group meets, position of the rank) → its transport; None: `ThreadTransport`
    """
    world = ThreadWorld(size, shares_memory, transport)
    results, errors = [None] * size, []

    def main(rank: int) -> None:
        try:
            with world.baton.held:
                results[rank] = function(rank, world)
        except BaseException as error:  # noqa: BLE001  the test must see whatever it was
            errors.append(
                (
                    isinstance(error, threading.BrokenBarrierError | queue.Empty),
                    rank,
                    error,
                )
            )
            world.abort()

    threads = [
        threading.Thread(target=main, args=(rank,), daemon=True) for rank in range(size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HUNG * 2)
    if errors:
        raise min(errors, key=lambda e: (e[0], e[1]))[2]
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    return results
