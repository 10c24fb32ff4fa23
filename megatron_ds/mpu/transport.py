"""`TorchTransport`: a group's transport over torch.distributed. `gloo.py` adds what is special to CPU runs.

torch.distributed takes global ranks and raises RuntimeError with the address of a socket. A group takes
positions, and its errors name the rank, the group, the operation and the rank that is stuck. This file
translates.

Note: lanes. NCCL has no tags: between two ranks, messages of one communicator arrive in the order in which
both sides post them. A pipeline has four streams without an order among them (activations and gradients, to
the next and to the previous rank), so on NCCL its group has a communicator for each. On gloo the tags of
messages separate the streams.

Note: control. On GPUs groups have NCCL alone. Objects, barriers and messages of CPU tensors go through the gloo
group of the world (`control.py`); collectives of CPU tensors, which only rare operations have, through the GPU.

Note: opening. torch connects two ranks at their first message in a lane, and the host of the first, also of
the first that posts a *receive*, waits until the other's host has come. Pipelines post receives early: a rank
could wait for a gradient to be sent, before it has sent the activation that the gradient needs. So all
neighbours exchange a number on every lane when the group is made. (Do not give `device_id` to
`init_process_group`: messages of a lane then share one stream, a receive from the previous rank in front of
the send to the next.)
"""

import math
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import CommunicationError
from ..host import places
from ..host.shared_pages import SharedPages, share_pages
from ..host.signal_pipes import SignalPipes, share_pipes
from .control import ring_gather
from .device_wait import wait_for_device
from .flight_recorder import save_record
from .group import DONE, AllOf, Messages, Work
from .stuck_ranks import (
    ANSWER_SECONDS,
    current_call,
    name_stuck_ranks,
    report_failure,
    within,
)

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
EXCHANGE_TAG = (1 << 20) + (1 << 16) + 1  # above those of channels and of gloo.py

# torch 2.13 renamed these two and warns at each use of the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


def lone_process_group(rank: int) -> dist.ProcessGroup | None:
    """Return a process group of this rank alone, None without torch.distributed. Only this rank calls."""
    return (
        dist.new_group([rank], use_local_synchronization=True)
        if dist.is_initialized()
        else None
    )


def timeout_of(process_group: dist.ProcessGroup) -> timedelta | None:
    """Return how long the collectives of a torch ProcessGroup may take; None if its backends have no timeout."""
    options = [
        getattr(process_group._get_backend(device), "options", None)
        for device in process_group._device_types
    ]
    return next((found._timeout for found in options if found is not None), None)


class TorchTransport:
    """`group.Transport` over one torch ProcessGroup. Failures and timeouts raise CommunicationError."""

    def __init__(
        self,
        process_group: dist.ProcessGroup,
        axes: str = "",
        lanes: Sequence[dist.ProcessGroup] = (),
        control: dist.ProcessGroup | None = None,
    ):
        """control: the gloo group of the world, for a process group that has NCCL alone"""
        self.process_group = process_group
        self.axes = axes
        self.lanes = lanes
        self.control = control
        self.ranks = tuple(dist.get_process_group_ranks(process_group))
        self.rank, self.size = dist.get_rank(process_group), len(self.ranks)

    @property
    def wait_seconds(self) -> float:
        """The timeout of the process group."""
        timeout = timeout_of(self.process_group)
        return math.inf if timeout is None else timeout.total_seconds()

    @cached_property
    def is_of_gpus_alone(self) -> bool:
        """Whether the process group cannot carry CPU tensors."""
        devices = self.process_group._device_types
        return bool(devices) and torch.device("cpu") not in devices

    def open_lanes(self, device: torch.device) -> None:
        """Connect each rank with the next, and the last with the first, on every lane. Collective."""
        for low, high in neighbours(self.size):
            for lane in self.lanes if self.rank in (low, high) else ():
                number = torch.zeros(1, device=device)
                with _Translated(
                    self, f"connecting ranks {self.ranks[low]} and {self.ranks[high]}"
                ):
                    if self.rank == low:
                        dist.send(number, self.ranks[high], lane)
                    else:
                        dist.recv(number, self.ranks[low], lane)

    def all_reduce(self, tensor: Tensor, op: str) -> Work:
        """Reduce the tensor over all ranks, in place."""
        return self._start("all-reduce", dist.all_reduce, tensor.detach(), _OPS[op])

    def all_gather(self, out: Tensor, tensor: Tensor) -> Work:
        """Gather flat [numel] of each rank into flat [n * numel]."""
        return self._start("all-gather", _all_gather, out.detach(), tensor.detach())

    def reduce_scatter(self, out: Tensor, tensor: Tensor, op: str) -> Work:
        """Reduce flat [n * numel] over all ranks; each keeps its flat [numel]."""
        return self._start(
            "reduce-scatter", _reduce_scatter, out.detach(), tensor.detach(), _OPS[op]
        )

    def all_to_all(
        self,
        out: Tensor,
        tensor: Tensor,
        sent: Sequence[int] | None = None,
        received: Sequence[int] | None = None,
    ) -> Work:
        """Send `sent[i]` rows to rank i and receive `received[i]` from it; equal pieces without these numbers."""
        splits = (
            () if sent is None or received is None else (list(received), list(sent))
        )
        return self._start(
            "all-to-all", dist.all_to_all_single, out.detach(), tensor.detach(), *splits
        )

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        """Give all ranks the tensor of the rank at position `source`."""
        return self._start(
            "broadcast", dist.broadcast, tensor.detach(), self.ranks[source]
        )

    def isend(self, tensor: Tensor, destination: int, tag: int) -> Work:
        """Start a message to the rank at position `destination`."""
        return self._send(tensor, destination, tag)

    def irecv(self, tensor: Tensor, source: int, tag: int) -> Work:
        """Start to receive a message of the tensor's shape and dtype into it."""
        what = f"receive from rank {self.ranks[source]}"
        lane = self._lane(tensor, source, self.rank, tag)
        return self._guard(
            what, lambda: dist.irecv(tensor.detach(), self.ranks[source], lane, tag)
        )

    def exchange(self, sends: Messages, receives: Messages) -> Work:
        """Start all messages together.

        They are one batch: on NCCL, unbatched messages in both directions can deadlock.
        """
        operations: list[tuple[Any, Tensor, int]] = [
            (dist.irecv, tensor, peer) for tensor, peer in receives
        ]
        operations += [(dist.isend, tensor, peer) for tensor, peer in sends]
        batch = [
            dist.P2POp(
                operation,
                tensor.detach(),
                self.ranks[peer],
                self.process_group,
                EXCHANGE_TAG,
            )
            for operation, tensor, peer in operations
        ]
        what = f"exchange with ranks {sorted({self.ranks[peer] for _, _, peer in operations})}"
        with _Translated(self, what):
            works = dist.batch_isend_irecv(batch) if batch else []
        return AllOf([TranslatedWork(work, self, what) for work in works])

    def all_gather_object(self, obj: Any) -> list:
        """Return the picklable objects of all ranks, in rank order."""
        objects = [None] * self.size
        with _Translated(self, "all-gather of objects"), places.WAITING:
            if self.control is not None:
                return ring_gather(obj, self.ranks, self.axes, self.control)
            dist.all_gather_object(objects, obj, group=self.process_group)
        return objects

    def barrier(self) -> None:
        """Return when all ranks have called it."""
        if self.control is not None:
            self.all_gather_object(None)
            return
        with _Translated(self, "barrier"), places.WAITING:
            dist.barrier(self.process_group)

    def share_memory(self) -> SharedPages | None:
        """Memory that all ranks map; None where they are on several hosts. Collective."""
        return share_pages(self.rank, self.all_gather_object)

    def share_signals(self) -> SignalPipes | None:
        """Signals among the ranks, which wait as long as the group's collectives. Collective."""
        return share_pipes(
            self.rank, self.ranks, self.all_gather_object, self.wait_seconds
        )

    def failure(self, what: str, error: Exception) -> CommunicationError:
        """Return the error to raise for `error`, with the group, its ranks and the probable cause."""
        return CommunicationError(_failure_message(self, what, error))

    def close(self) -> None:
        """Destroy the process groups: one that outlives the interpreter's threads aborts the process."""
        for process_group in (*self.lanes, self.process_group):
            dist.destroy_process_group(process_group)
        self.lanes = ()
        self.process_group = None  # type: ignore[assignment]  # of a closed one, which nothing uses
        self.control = None

    def _lane(
        self, tensor: Tensor, source: int, destination: int, tag: int
    ) -> dist.ProcessGroup:
        """`Channels` gives activations even and gradients odd tags."""
        if self.control is not None and tensor.device.type == "cpu":
            return self.control
        return (
            self.lanes[2 * (tag % 2) + (source < destination)]
            if self.lanes
            else self.process_group
        )

    def _send(self, tensor: Tensor, destination: int, tag: int) -> "TranslatedWork":
        what = f"send to rank {self.ranks[destination]}"
        lane = self._lane(tensor, self.rank, destination, tag)
        return self._guard(
            what,
            lambda: dist.isend(tensor.detach(), self.ranks[destination], lane, tag),
        )

    def _start(self, what: str, function: Callable, *arguments: Any) -> Work:
        if arguments[0].device.type == "cpu" and self.is_of_gpus_alone:
            return self._start_on_device(what, function, *arguments)
        return self._guard(
            what, lambda: function(*arguments, group=self.process_group, async_op=True)
        )

    def _start_on_device(self, what: str, function: Callable, *arguments: Any) -> Work:
        """Run a collective of CPU tensors by way of the GPU. The host waits for it."""
        device = torch.device("cuda", torch.cuda.current_device())
        far = [i for i, value in enumerate(arguments) if isinstance(value, Tensor)]
        near = list(arguments)
        for i in far:
            near[i] = arguments[i].to(device)
        self._start(what, function, *near).wait()
        reached = torch.cuda.Event()
        reached.record()
        with places.WAITING_FOR_DEVICE:
            wait_for_device(reached.query, self)
        for i in far:
            arguments[i].copy_(near[i])
        return DONE

    def _guard(self, what: str, call: Callable[[], Any]) -> "TranslatedWork":
        with _Translated(self, what):
            return TranslatedWork(call(), self, what)


def neighbours(size: int) -> list[tuple[int, int]]:
    """Return the pairs of neighbours in a ring, in an order in which most are disjoint from those before and after:
    ranks that connect in this order need three rounds for any size."""
    pairs = [(i, i + 1) for i in range(size - 1)] + [(0, size - 1)] * (size > 2)
    return pairs[::2] + pairs[1::2]


class TranslatedWork:
    """A torch work whose failure names the rank, the group and the operation."""

    __slots__ = ("_work", "_transport", "_what")

    def __init__(self, work: Any, transport: TorchTransport, what: str):
        self._work = work
        self._transport = transport
        self._what = what

    def wait(self) -> None:
        with _Translated(self._transport, self._what):
            with places.WAITING:
                self._work.wait()

    def wait_in_thread(self) -> None:
        """`wait`, by a thread beside the one that trains."""
        with _Translated(self._transport, self._what):
            self._work.wait()

    def is_completed(self) -> bool:
        return self._work.is_completed()


class _Translated:
    """Context that turns torch's exceptions into CommunicationError. A class: entering it is cheap."""

    __slots__ = ("transport", "what")

    def __init__(self, transport: TorchTransport, what: str):
        self.transport = transport
        self.what = what

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        if isinstance(error, RuntimeError) and not isinstance(
            error, torch.cuda.OutOfMemoryError
        ):
            raise CommunicationError(
                _failure_message(self.transport, self.what, error)
            ) from error


# Messages of the backends when a peer's socket closes, as opposed to when nothing arrives through it.
_CLOSED = (
    "closed by peer",
    "connection reset",
    "connection refused",
    "broken pipe",
    "socket closed",
    "remote process exited",
)


def _failure_message(transport: TorchTransport, what: str, error: Exception) -> str:
    """Return what failed, where, why as far as the other ranks' reports show, and the backend's own message."""
    # The backend's own message, without its general advice.
    me = transport.ranks[transport.rank]
    peers = list(transport.ranks)
    cause = str(error).split("This is typically caused")[0].strip()
    # A closed connection, a timeout, or another error. The first and last are reported to the other ranks.
    if any(closed in cause.lower() for closed in _CLOSED):
        report_failure()
        why = (
            "A peer exited: the earliest error among these ranks is the cause; if there is none, the peer "
            "was killed (out of memory?)"
        )
    elif "timed out" in cause.lower() or "timeout" in cause.lower():
        stuck = (
            name_stuck_ranks()
            or "Look for a rank that is busy or stuck, or that took another path"
        )
        why = (
            "A peer did not arrive in time (--distributed-timeout-minutes, or "
            f"init_distributed(timeout=…), sets the time to wait). {stuck}"
        )
        if recorded := within(ANSWER_SECONDS, lambda: save_record(me)):
            why = f"{why}. {recorded}"
    else:
        report_failure()
        why = "Look for the earliest error among these ranks"
    # Where, what and why in one message.
    call = f" in {current_call()}" if current_call() else ""
    return (
        f"rank {me}{call}: {what} failed in the {transport.axes or 'unnamed'} group of ranks {peers}. "
        f"{why}. Message of the backend: {cause}"
    )
