"""`TorchTransport`: how the bytes of a group travel in real runs. gloo on CPU, nccl on CUDA.

torch.distributed takes global ranks and raises RuntimeError with the address of a socket; a group takes positions, and an
error must name the rank, the group, the operation and the rank that is stuck. This file translates between the two.

Note: lanes. nccl has no tags: between two ranks, messages of one communicator arrive in the order in which both sides call.
Activations and gradients, up and down the pipeline, are four streams without an order among them, so on nccl a pipeline
group has a communicator for each (kind, direction). On gloo tags do it.
"""

import queue
import threading
from datetime import timedelta

import torch
import torch.distributed as dist

from ..errors import CommunicationError
from ..host.shared_memory import share_pages
from .gloo_collectives import Pieces
from .stuck_ranks import name_stuck_ranks, report_failure

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}

# torch 2.13 gave these two new names and warns at each use of the old ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def connect_torch(axes: str, groups: list[tuple[int, ...]], rank: int,
                  timeout: timedelta | None = None) -> "TorchTransport | None":
    """Make the process groups of `groups` and return the transport of the one that holds `rank`, None where it is alone.

    Collective over the whole world, members or not: torch names groups by counting them, so every rank must count alike.
    """
    mine = None
    num_lanes = 4 if axes == "pp" and "nccl" in dist.get_backend_config() else 0
    for ranks in groups:
        if len(ranks) > 1:
            made = [dist.new_group(list(ranks), timeout=timeout, group_desc=axes) for _ in range(1 + num_lanes)]
            if rank in ranks:
                mine = TorchTransport(made[0], axes, made[1:])
    return mine


def lone_process_group(rank: int) -> dist.ProcessGroup | None:
    """A process group of this rank alone, None where torch.distributed was not started. Only this rank calls."""
    return dist.new_group([rank], use_local_synchronization=True) if dist.is_initialized() else None


class TorchTransport:
    """`group.Transport` over one torch ProcessGroup. Failures and timeouts raise CommunicationError."""

    def __init__(self, process_group: dist.ProcessGroup, axes: str = "", lanes: list[dist.ProcessGroup] | None = None):
        self.process_group, self.axes, self.lanes = process_group, axes, lanes or []
        self.ranks = tuple(dist.get_process_group_ranks(process_group))
        self.rank, self.size = dist.get_rank(process_group), len(self.ranks)
        self._outbox = _Outbox()
        self._pieces = Pieces(self.rank, self.size, self._send_piece, self._receive_piece)

    def all_reduce(self, tensor, op):
        # Of two ranks gloo's has the same bits, a + b = b + a, is as fast, and needs nobody to wait for its second round.
        if op == "sum" and self.size > 2 and not tensor.is_cuda:
            return self._pieces.all_reduce(tensor.detach())
        return self._start("all-reduce", dist.all_reduce, tensor.detach(), _OPS[op])

    def all_gather(self, out, tensor):
        if not tensor.is_cuda:
            return self._pieces.all_gather(out.detach(), tensor.detach())
        return self._start("all-gather", _all_gather, out.detach(), tensor.detach())

    def reduce_scatter(self, out, tensor, op):
        if op == "sum" and not tensor.is_cuda:
            return self._pieces.reduce_scatter(out.detach(), tensor.detach())
        return self._start("reduce-scatter", _reduce_scatter, out.detach(), tensor.detach(), _OPS[op])

    def all_to_all(self, out, tensor):
        return self._start("all-to-all", dist.all_to_all_single, out.detach(), tensor.detach())

    def broadcast(self, tensor, source):
        return self._start("broadcast", dist.broadcast, tensor.detach(), self.ranks[source])

    def isend(self, tensor, destination, tag):
        what, lane = f"send to rank {self.ranks[destination]}", self._lane(self.rank, destination, tag)
        work = self._guard(what, lambda: dist.isend(tensor.detach(), self.ranks[destination], lane, tag))
        return work if tensor.is_cuda else self._outbox.put(work)

    def irecv(self, tensor, source, tag):
        what, lane = f"receive from rank {self.ranks[source]}", self._lane(source, self.rank, tag)
        return self._guard(what, lambda: dist.irecv(tensor.detach(), self.ranks[source], lane, tag))

    def all_gather_object(self, obj):
        objects = [None] * self.size
        with _Translated(self, "all-gather of objects"):
            dist.all_gather_object(objects, obj, group=self.process_group)
        return objects

    def barrier(self):
        with _Translated(self, "barrier"):
            dist.barrier(self.process_group)

    def share_memory(self):
        return share_pages(self.rank, self.all_gather_object)

    def close(self) -> None:
        """Give the process groups back to torch and forget them: one that outlives the interpreter's threads aborts it."""
        self._outbox.close()
        for process_group in (*self.lanes, self.process_group):
            dist.destroy_process_group(process_group)
        self.lanes, self.process_group = (), None

    def _lane(self, source: int, destination: int, tag: int) -> dist.ProcessGroup:
        return self.lanes[2 * (tag % 2) + (source < destination)] if self.lanes else self.process_group

    def _send_piece(self, tensor, destination, tag):
        return self._guard(f"sending a piece to rank {self.ranks[destination]}",
                           lambda: dist.isend(tensor, self.ranks[destination], self.process_group, tag))

    def _receive_piece(self, tensor, source, tag):
        return self._guard(f"receiving a piece from rank {self.ranks[source]}",
                           lambda: dist.irecv(tensor, self.ranks[source], self.process_group, tag))

    def _start(self, what, function, *arguments):
        return self._guard(what, lambda: function(*arguments, group=self.process_group, async_op=True))

    def _guard(self, what, call):
        with _Translated(self, what):
            return _Work(call(), self, what)


class _Work:
    """A torch work whose failure names the rank, the group and the operation."""

    __slots__ = ("_work", "_transport", "_what")

    def __init__(self, work, transport, what):
        self._work, self._transport, self._what = work, transport, what

    def wait(self) -> None:
        with _Translated(self._transport, self._what):
            self._work.wait()

    def is_completed(self) -> bool:
        return self._work.is_completed()


class _Outbox:
    """Waits for gloo's sends in a thread of its own.

    A send of gloo is over when the receiver has taken it, and only `wait` tells: its `is_completed` stays False before, and a
    `wait` that times out breaks the connection. Without somebody waiting, each message of a step would stay in memory until
    the step ends.
    """

    def __init__(self):
        self._sends = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, work: _Work) -> "_Sent":
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="sends", daemon=True)
            self._thread.start()
        sent = _Sent()
        self._sends.put((work, sent))
        return sent

    def close(self) -> None:
        if self._thread is not None:
            self._sends.put(None)

    def _serve(self) -> None:
        while (entry := self._sends.get()) is not None:
            work, sent = entry
            try:
                work.wait()
            except Exception as error:      # whatever it is, it is for whoever waits; a thread that ended would leave them so
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
    """Context that turns what torch raises into a CommunicationError. A class, as it is entered at every collective."""

    __slots__ = ("transport", "what")

    def __init__(self, transport: TorchTransport, what: str):
        self.transport, self.what = transport, what

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        if isinstance(error, RuntimeError) and not isinstance(error, torch.cuda.OutOfMemoryError):
            raise CommunicationError(_story(self.transport, self.what, error)) from error


# What the backends say when a peer's socket closes, as opposed to when nothing comes through it.
_GONE = ("closed by peer", "connection reset", "connection refused", "broken pipe", "socket closed", "remote process exited")


def _story(transport: TorchTransport, what: str, error: RuntimeError) -> str:
    me, peers = transport.ranks[transport.rank], list(transport.ranks)
    said = str(error).split("This is typically caused")[0].strip()
    if any(words in said.lower() for words in _GONE):
        report_failure()
        why = ("A peer exited: the earliest error among these ranks is the cause; if there is none, the peer was killed "
               "(out of memory?)")
    elif "timed out" in said.lower() or "timeout" in said.lower():
        stuck = name_stuck_ranks() or "Look for a rank that is busy or stuck, or that took another path"
        why = f"A peer did not arrive in time (--distributed-timeout-minutes sets how long ranks wait). {stuck}"
    else:
        report_failure()
        why = "Look for the earliest error among these ranks"
    return (f"rank {me}: {what} failed in the {transport.axes or 'unnamed'} group of ranks {peers}. {why}. The backend said: "
            f"{said}")
