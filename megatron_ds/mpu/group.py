"""`Group`: ranks that communicate with each other, and the transport that connects them.

A group is a value passed to the layers that need it; no code looks one up from a global. A `Transport` moves
the bytes: torch.distributed in real runs (`transport.py`), threads in tests, none for a group of one rank.
`Traffic` counts them.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from ..host.shared_pages import SharedPages
    from .shared_sums import SharedSums, Signals

RING_FACTOR = {  # bytes sent by one rank of a ring of n, per byte of payload
    "all_reduce": lambda n: 2 * (n - 1) / n,
    **dict.fromkeys(
        ("all_gather", "reduce_scatter", "all_to_all"), lambda n: (n - 1) / n
    ),
    **dict.fromkeys(("all_to_all_v", "broadcast", "reduce", "send"), lambda n: 1.0),
}


@dataclass
class Traffic:
    """Payload bytes and calls, keyed by (operation, group axes, group size).

    log: records also message sizes and times, if there is one
    """

    bytes: Counter[tuple[str, str, int]] = field(default_factory=Counter)
    calls: Counter[tuple[str, str, int]] = field(default_factory=Counter)
    log: "TrafficLog | None" = None

    def add(
        self, operation: str, axes: str, size: int, num_bytes: int, calls: int = 1
    ) -> None:
        """Count calls with `num_bytes` in total."""
        self.bytes[operation, axes, size] += num_bytes
        self.calls[operation, axes, size] += calls

    def add_all(self, other: "Traffic", times: int = 1) -> None:
        """Count what `other` counted, `times` times."""
        for key, num_bytes in other.bytes.items():
            operation, axes, size = key
            self.add(operation, axes, size, times * num_bytes, times * other.calls[key])

    def clear(self) -> None:
        """Set all counters to zero."""
        self.bytes.clear()
        self.calls.clear()

    def wire_bytes(self) -> dict[tuple[str, str, int], float]:
        """Bytes a rank sends when every collective is a ring."""
        return {
            (op, axes, n): count * RING_FACTOR[op](n)
            for (op, axes, n), count in self.bytes.items()
        }


Messages = Sequence[tuple["Tensor", int]]
"""(tensor, position of the other rank in the group)"""

# Groups over these axes carry that many streams of messages (`isend`) without an order among them. Where the
# backend has no tags, the transport has a communicator for each.
NUM_STREAMS = {"pp": 4}

# Groups over these axes send activations within layers. On one host without GPUs their collectives go through
# its memory.
ACTIVATION_AXES = ("tp", "cp", "etp")


class Waitable(Protocol):
    """Something that has begun."""

    def wait(self) -> Any:
        """Return when results may be read and inputs overwritten (on a GPU: by work queued afterwards)."""


class Work(Waitable, Protocol):
    """A collective, or a message, that has begun."""

    def is_completed(self) -> bool:
        """Return whether the tensor of a send may be freed. False if unknown."""


class TrafficLog(Protocol):
    """Records what a `Traffic` counts."""

    def start(
        self,
        operation: str,
        group: "Group",
        num_bytes: int,
        begin: "Callable[[], Work]",
    ) -> "Work":
        """`begin()`, whose work is recorded when it is found complete."""


class Done:
    """A `Work` that is complete, for a collective with nothing to do."""

    def wait(self) -> None:
        """Return at once."""

    def is_completed(self) -> bool:
        """Always True."""
        return True


DONE = Done()


class AllOf:
    """Several `Work`s as one. Waiting again returns at once."""

    __slots__ = ("_works",)

    def __init__(self, works: Sequence[Work]):
        self._works = list(works)

    def wait(self) -> None:
        """Wait for each, in order."""
        works = self._works
        self._works = []
        for work in works:
            work.wait()

    def is_completed(self) -> bool:
        """Return whether all of them are completed."""
        return all(work.is_completed() for work in self._works)


class Transport(Protocol):
    """Moves tensors among the ranks of one group. Positions are indices into the group, never global ranks.

    Each method is collective over the group, except `isend`, `irecv` and `exchange`. Tensors are contiguous;
    results are written in place. `op` is one of "sum", "max", "min".

    """

    @property
    def wait_seconds(self) -> float:
        """How long an operation may take, after which it fails."""

    def all_reduce(self, tensor: "Tensor", op: str) -> Work:
        """`tensor` becomes the reduction over all ranks."""

    def all_gather(self, out: "Tensor", tensor: "Tensor") -> Work:
        """Gather flat [numel] of each rank into flat [n * numel]. `tensor` may be a piece of `out`."""

    def reduce_scatter(self, out: "Tensor", tensor: "Tensor", op: str) -> Work:
        """Reduce flat [numel], keep flat [numel / n] on each rank. `out` may be a piece of `tensor`."""

    def all_to_all(
        self,
        out: "Tensor",
        tensor: "Tensor",
        sent: Sequence[int] | None = None,
        received: Sequence[int] | None = None,
    ) -> Work:
        """Rows of `tensor` to each rank: `sent[i]` to rank i; `received[i]` rows of `out` from it.

        Without them, flat tensors in n equal pieces.
        """

    def broadcast(self, tensor: "Tensor", source: int) -> Work:
        """`tensor` becomes that of `source`."""

    def isend(self, tensor: "Tensor", destination: int, tag: int) -> Work:
        """Start a message. Those of one (source, destination, tag) arrive in order."""

    def irecv(self, tensor: "Tensor", source: int, tag: int) -> Work:
        """Receive a message of the shape and dtype of `tensor` into it."""

    def exchange(self, sends: "Messages", receives: "Messages") -> Work:
        """Start all sends (tensor, destination) and receives (tensor, source) together."""

    def all_gather_object(self, obj: Any) -> list:
        """Return the picklable objects of all ranks, in order."""

    def barrier(self) -> None:
        """Return when all ranks have called it."""

    def share_memory(self) -> "SharedPages | None":
        """Memory that all ranks map; None where they are on several hosts."""

    def share_signals(self) -> "Signals | None":
        """Signals among the ranks, if they share memory; None where the system forbids it."""

    def failure(self, what: str, error: Exception) -> Exception:
        """Return the error to raise when an operation on shared memory, or a wait for the device, failed."""


@dataclass(frozen=True, eq=False)
class Group:
    """Ranks that communicate with each other, seen from one of them.

    axes       which mesh axes the group spans, joined by "-" ("tp", "dp-cp"); its name in errors and traffic
    ranks      their global ranks, in group order
    rank       the position of this process in `ranks`
    transport  None exactly when the group has one rank
    memory     memory that its ranks share; None if not requested (`collectives.share_memory`) or impossible
    sums       reductions of tensors in that memory; None likewise
    """

    axes: str
    ranks: tuple[int, ...]
    rank: int
    transport: Transport | None = None
    traffic: Traffic = field(default_factory=Traffic)
    memory: "SharedPages | None" = None
    sums: "SharedSums | None" = None

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def link(self) -> Transport:
        """The transport of a group of several ranks."""
        assert self.transport is not None, f"{self} of one rank moves no bytes"
        return self.transport

    @property
    def shared_memory(self) -> "SharedPages":
        """The memory of a group whose ranks share some."""
        assert self.memory is not None, f"the ranks of {self} share no memory"
        return self.memory

    @property
    def shared_sums(self) -> "SharedSums":
        """The reductions of a group whose ranks share memory."""
        assert self.sums is not None, f"the ranks of {self} share no memory"
        return self.sums

    def __repr__(self) -> str:
        return f"Group({self.axes}, rank {self.rank} of {self.size}, ranks {list(self.ranks)})"


def solo(axes: str = "solo", rank: int = 0) -> Group:
    """Return a group of one: its collectives return their input."""
    return Group(axes, (rank,), 0)


def coordinates_of(*groups: Group) -> dict[str, tuple[int, int]]:
    """axis → (rank, size) of groups over one axis each, for `ParamSpec.boxes`."""
    return {group.axes: (group.rank, group.size) for group in groups}
