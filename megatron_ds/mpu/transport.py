"""`TorchTransport`: a group's transport over torch.distributed: gloo for CPU tensors, NCCL for CUDA tensors.

torch.distributed takes global ranks and raises RuntimeError with the address of a socket. A group takes
positions, and its errors name the rank, the group, the operation and the rank that is stuck. This file
translates.

Note: lanes. NCCL has no tags: between two ranks, messages of one communicator arrive in the order in which
both sides post them. A pipeline has four streams without an order among them (activations and gradients, to
the next and to the previous rank), so on NCCL its group has a communicator for each. On gloo the tags of
messages separate the streams.
"""

import queue
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import CommunicationError
from ..host.memory_maps import SharedPages, share_pages
from .collectives import LAST_TAG, Pieces
from .group import NUM_STREAMS, AllOf, Messages, Work
from .stuck_ranks import name_stuck_ranks, report_failure

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
EXCHANGE_TAG = LAST_TAG + 1

# torch 2.13 renamed these two and warns at each use of the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def connect_torch(axes: str, groups: list[tuple[int, ...]], rank: int,
                  timeout: timedelta | None = None) -> "TorchTransport | None":
    """Make the process groups of `groups`; return the transport of the one with `rank`, None if it is alone
    there.

    Collective over the whole world, not only over members: torch names groups by counting them, so all ranks
    must make the same groups.
    """
    mine = None
    num_lanes = NUM_STREAMS.get(axes, 0) if "nccl" in dist.get_backend_config() else 0
    for ranks in groups:
        if len(ranks) > 1:
            made = [dist.new_group(list(ranks), timeout=timeout, group_desc=axes)
                    for _ in range(1 + num_lanes)]
            if rank in ranks:
                mine = TorchTransport(made[0], axes, made[1:])
    return mine


def lone_process_group(rank: int) -> dist.ProcessGroup | None:
    """A process group of this rank alone, None without torch.distributed. Only this rank calls."""
    return dist.new_group([rank], use_local_synchronization=True) if dist.is_initialized() else None


class TorchTransport:
    """`group.Transport` over one torch ProcessGroup. Failures and timeouts raise CommunicationError."""

    def __init__(self, process_group: dist.ProcessGroup, axes: str = "",
                 lanes: Sequence[dist.ProcessGroup] = ()):
        self.process_group, self.axes, self.lanes = process_group, axes, lanes
        self.ranks = tuple(dist.get_process_group_ranks(process_group))
        self.rank, self.size = dist.get_rank(process_group), len(self.ranks)
        self._outbox = _Outbox()
        self._pieces = Pieces(self.rank, self.size, self._send_piece, self._receive_piece)

    def all_reduce(self, tensor: Tensor, op: str) -> Work:
        """As in `Transport`. Of two ranks gloo's own: a + b = b + a, so it has the same bits, it is as fast,
        and its second round does not run in `wait`."""
        if op == "sum" and self.size > 2 and not tensor.is_cuda:
            return self._pieces.all_reduce(tensor.detach())
        return self._start("all-reduce", dist.all_reduce, tensor.detach(), _OPS[op])

    def all_gather(self, out: Tensor, tensor: Tensor) -> Work:
        """As in `Transport`."""
        if not tensor.is_cuda:
            return self._pieces.all_gather(out.detach(), tensor.detach())
        return self._start("all-gather", _all_gather, out.detach(), tensor.detach())

    def reduce_scatter(self, out: Tensor, tensor: Tensor, op: str) -> Work:
        """As in `Transport`."""
        if op == "sum" and not tensor.is_cuda:
            return self._pieces.reduce_scatter(out.detach(), tensor.detach())
        return self._start("reduce-scatter", _reduce_scatter, out.detach(), tensor.detach(), _OPS[op])

    def all_to_all(self, out: Tensor, tensor: Tensor, sent: Sequence[int] | None = None,
                   received: Sequence[int] | None = None) -> Work:
        """As in `Transport`."""
        splits = () if sent is None else (list(received), list(sent))
        return self._start("all-to-all", dist.all_to_all_single, out.detach(), tensor.detach(), *splits)

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        """As in `Transport`."""
        return self._start("broadcast", dist.broadcast, tensor.detach(), self.ranks[source])

    def isend(self, tensor: Tensor, destination: int, tag: int) -> Work:
        """As in `Transport`. On gloo a thread waits for the send; see `_Outbox`."""
        what, lane = f"send to rank {self.ranks[destination]}", self._lane(self.rank, destination, tag)
        work = self._guard(what, lambda: dist.isend(tensor.detach(), self.ranks[destination], lane, tag))
        return work if tensor.is_cuda else self._outbox.put(work)

    def irecv(self, tensor: Tensor, source: int, tag: int) -> Work:
        """As in `Transport`."""
        what, lane = f"receive from rank {self.ranks[source]}", self._lane(source, self.rank, tag)
        return self._guard(what, lambda: dist.irecv(tensor.detach(), self.ranks[source], lane, tag))

    def exchange(self, sends: Messages, receives: Messages) -> Work:
        """As in `Transport`. One batch on NCCL, where unbatched messages in both directions can deadlock."""
        operations = [(dist.irecv, tensor, peer) for tensor, peer in receives]
        operations += [(dist.isend, tensor, peer) for tensor, peer in sends]
        batch = [dist.P2POp(operation, tensor.detach(), self.ranks[peer], self.process_group, EXCHANGE_TAG)
                 for operation, tensor, peer in operations]
        what = f"exchange with ranks {sorted({self.ranks[peer] for _, _, peer in operations})}"
        with _Translated(self, what):
            works = dist.batch_isend_irecv(batch) if batch else []
        return AllOf([_Work(work, self, what) for work in works])

    def all_gather_object(self, obj: Any) -> list:
        """As in `Transport`."""
        objects = [None] * self.size
        with _Translated(self, "all-gather of objects"):
            dist.all_gather_object(objects, obj, group=self.process_group)
        return objects

    def barrier(self) -> None:
        """As in `Transport`."""
        with _Translated(self, "barrier"):
            dist.barrier(self.process_group)

    def share_memory(self) -> SharedPages | None:
        """As in `Transport`."""
        return share_pages(self.rank, self.all_gather_object)

    def close(self) -> None:
        """Destroy the process groups: one that outlives the interpreter's threads aborts the process."""
        self._outbox.close()
        for process_group in (*self.lanes, self.process_group):
            dist.destroy_process_group(process_group)
        self.lanes, self.process_group = (), None

    def _lane(self, source: int, destination: int, tag: int) -> dist.ProcessGroup:
        """`Channels` gives activations even and gradients odd tags."""
        return self.lanes[2 * (tag % 2) + (source < destination)] if self.lanes else self.process_group

    def _send_piece(self, tensor: Tensor, destination: int, tag: int) -> Work:
        return self._guard(f"sending a piece to rank {self.ranks[destination]}",
                           lambda: dist.isend(tensor, self.ranks[destination], self.process_group, tag))

    def _receive_piece(self, tensor: Tensor, source: int, tag: int) -> Work:
        return self._guard(f"receiving a piece from rank {self.ranks[source]}",
                           lambda: dist.irecv(tensor, self.ranks[source], self.process_group, tag))

    def _start(self, what: str, function: Callable, *arguments: Any) -> Work:
        return self._guard(what, lambda: function(*arguments, group=self.process_group, async_op=True))

    def _guard(self, what: str, call: Callable[[], Any]) -> Work:
        with _Translated(self, what):
            return _Work(call(), self, what)


class _Work:
    """A torch work whose failure names the rank, the group and the operation."""

    __slots__ = ("_work", "_transport", "_what")

    def __init__(self, work: Any, transport: TorchTransport, what: str):
        self._work, self._transport, self._what = work, transport, what

    def wait(self) -> None:
        with _Translated(self._transport, self._what):
            self._work.wait()

    def is_completed(self) -> bool:
        return self._work.is_completed()


class _Outbox:
    """Waits for gloo's sends in a thread.

    A send of gloo is complete when the receiver has taken the message, and only `wait` detects this:
    `is_completed` stays False until then, and a `wait` that times out breaks the connection. Without a
    thread that waits, every message of a step would stay in memory until the step ends.
    """

    def __init__(self):
        self._sends = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, work: _Work) -> "_Sent":
        """Wait for `work` in the thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="sends", daemon=True)
            self._thread.start()
        sent = _Sent()
        self._sends.put((work, sent))
        return sent

    def close(self) -> None:
        """End the thread after the sends it has."""
        if self._thread is not None:
            self._sends.put(None)

    def _serve(self) -> None:
        while (entry := self._sends.get()) is not None:
            work, sent = entry
            try:
                work.wait()
            except Exception as error:      # raised in `_Sent.wait`
                sent.error = error
            sent.over.set()
            del entry, work, sent               # they would keep the message until the next one


class _Sent:
    """A send that the outbox waits for."""

    __slots__ = ("over", "error")

    def __init__(self):
        self.over, self.error = threading.Event(), None

    def wait(self) -> None:
        self.over.wait()
        if self.error is not None:
            raise self.error

    def is_completed(self) -> bool:
        return self.over.is_set() and self.error is None


class _Translated:
    """Context that turns torch's exceptions into CommunicationError. A class: entering it is cheap."""

    __slots__ = ("transport", "what")

    def __init__(self, transport: TorchTransport, what: str):
        self.transport, self.what = transport, what

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        if isinstance(error, RuntimeError) and not isinstance(error, torch.cuda.OutOfMemoryError):
            raise CommunicationError(_failure_message(self.transport, self.what, error)) from error


# Messages of the backends when a peer's socket closes, as opposed to when nothing arrives through it.
_CLOSED = ("closed by peer", "connection reset", "connection refused", "broken pipe", "socket closed",
           "remote process exited")


def _failure_message(transport: TorchTransport, what: str, error: RuntimeError) -> str:
    """What failed, where, why as far as the other ranks' reports show, and the backend's own message."""
    me, peers = transport.ranks[transport.rank], list(transport.ranks)
    cause = str(error).split("This is typically caused")[0].strip()
    if any(closed in cause.lower() for closed in _CLOSED):
        report_failure()
        why = ("A peer exited: the earliest error among these ranks is the cause; if there is none, the peer "
               "was killed (out of memory?)")
    elif "timed out" in cause.lower() or "timeout" in cause.lower():
        stuck = name_stuck_ranks() or "Look for a rank that is busy or stuck, or that took another path"
        why = f"A peer did not arrive in time (--distributed-timeout-minutes sets the time to wait). {stuck}"
    else:
        report_failure()
        why = "Look for the earliest error among these ranks"
    return (f"rank {me}: {what} failed in the {transport.axes or 'unnamed'} group of ranks {peers}. {why}. "
            f"Message of the backend: {cause}")
