"""`TorchTransport`: how the bytes of a group travel in real runs. gloo on CPU, nccl on CUDA.

torch.distributed speaks in global ranks and raises RuntimeError with the address of a socket; a group speaks in positions,
and an error must say who waited for what. This file is the translation.
"""

from datetime import timedelta

import torch.distributed as dist

from ..errors import CommunicationError

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
    for ranks in groups:
        if len(ranks) == 1:
            continue
        process_group = dist.new_group(list(ranks), timeout=timeout, group_desc=axes)
        if rank in ranks:
            mine = TorchTransport(process_group, axes)
    return mine


class TorchTransport:
    """`group.Transport` over one torch ProcessGroup. Failures and timeouts raise CommunicationError."""

    def __init__(self, process_group: dist.ProcessGroup, axes: str = ""):
        self.process_group, self.axes = process_group, axes
        self.ranks = tuple(dist.get_process_group_ranks(process_group))
        self.rank, self.size = dist.get_rank(process_group), len(self.ranks)

    def all_reduce(self, tensor, op):
        return self._start("all-reduce", dist.all_reduce, tensor.detach(), _OPS[op])

    def all_gather(self, out, tensor):
        return self._start("all-gather", _all_gather, out.detach(), tensor.detach())

    def reduce_scatter(self, out, tensor, op):
        return self._start("reduce-scatter", _reduce_scatter, out.detach(), tensor.detach(), _OPS[op])

    def all_to_all(self, out, tensor):
        return self._start("all-to-all", dist.all_to_all_single, out.detach(), tensor.detach())

    def broadcast(self, tensor, source):
        return self._start("broadcast", dist.broadcast, tensor.detach(), self.ranks[source])

    def isend(self, tensor, destination, tag):
        what = f"send to rank {self.ranks[destination]}"
        return self._guard(what, lambda: dist.isend(tensor.detach(), self.ranks[destination], self.process_group, tag))

    def irecv(self, tensor, source, tag):
        what = f"receive from rank {self.ranks[source]}"
        return self._guard(what, lambda: dist.irecv(tensor.detach(), self.ranks[source], self.process_group, tag))

    def all_gather_object(self, obj):
        objects = [None] * self.size
        with _Translated(self, "all-gather of objects"):
            dist.all_gather_object(objects, obj, group=self.process_group)
        return objects

    def barrier(self):
        with _Translated(self, "barrier"):
            dist.barrier(self.process_group)

    def close(self) -> None:
        """Give the process group back to torch."""
        dist.destroy_process_group(self.process_group)

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


class _Translated:
    """Context that turns what torch raises into a CommunicationError. A class, as it is entered at every collective."""

    __slots__ = ("transport", "what")

    def __init__(self, transport: TorchTransport, what: str):
        self.transport, self.what = transport, what

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        if isinstance(error, RuntimeError):
            raise CommunicationError(_story(self.transport, self.what, error)) from error


def _story(transport: TorchTransport, what: str, error: RuntimeError) -> str:
    me, peers = transport.ranks[transport.rank], list(transport.ranks)
    return (f"rank {me}: {what} failed in the {transport.axes or 'unnamed'} group of ranks {peers}. Either a peer ended, "
            f"look for the first error among those ranks, or it never came, look for a rank that is busy or took another "
            f"path (--distributed-timeout-minutes is how long to wait). The backend said: {error}")
