"""`Group`: the ranks that speak together, and how they reach each other.

A group is a value handed down to the layers that need it; nothing looks one up from a global. How bytes travel is a
`Transport`: torch.distributed in real runs (`transport.py`), plain threads in tests, nothing at all for a group of one.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from .traffic import Traffic

if TYPE_CHECKING:
    from ..host.shared_memory import SharedPages


class Work(Protocol):
    """A collective, or a message, under way."""

    def wait(self) -> Any: ...
    def is_completed(self) -> bool: ...      # asked of sends only: may the tensor be let go?


class Done:
    """The work of a collective that had nothing to do."""

    def wait(self) -> None:
        return None

    def is_completed(self) -> bool:
        return True


DONE = Done()


class Transport(Protocol):
    """Moves tensors among the ranks of one group. Positions are indices into the group, never global ranks.

    Each method is collective over the group, except `isend` and `irecv`. Tensors are contiguous; results are written in
    place. `op` is one of "sum", "max", "min". All return a `Work`.
    """

    def all_reduce(self, tensor, op: str) -> Work: ...
    def all_gather(self, out, tensor) -> Work: ...            # out: [n * numel], tensor: [numel], both flat
    def reduce_scatter(self, out, tensor, op: str) -> Work: ...  # out: [numel / n], tensor: [numel], both flat
    def all_to_all(self, out, tensor) -> Work: ...            # both flat, n equal pieces
    def broadcast(self, tensor, source: int) -> Work: ...
    def isend(self, tensor, destination: int, tag: int) -> Work: ...
    def irecv(self, tensor, source: int, tag: int) -> Work: ...
    def all_gather_object(self, obj) -> list: ...
    def barrier(self) -> None: ...
    def share_memory(self) -> "SharedPages | None": ...     # not a Work: the files, or None where ranks are apart


@dataclass(frozen=True, eq=False)
class Group:
    """Ranks that speak together, seen from one of them.

    axes       which mesh axes the group spans, joined by "-" ("tp", "dp-cp"); names the group in errors and traffic
    ranks      their global ranks, in group order
    rank       the position of this process in `ranks`
    transport  None exactly when the group has one rank
    memory     that its ranks see of each other; None: not asked for (`collectives.share_memory`), or they cannot
    """

    axes: str
    ranks: tuple[int, ...]
    rank: int
    transport: Transport | None = None
    traffic: Traffic = field(default_factory=Traffic)
    memory: "SharedPages | None" = None

    @property
    def size(self) -> int:
        return len(self.ranks)

    def __repr__(self) -> str:
        return f"Group({self.axes}, rank {self.rank} of {self.size}, ranks {list(self.ranks)})"


def solo(axes: str = "solo", rank: int = 0) -> Group:
    """A group of one: its collectives return their input."""
    return Group(axes, (rank,), 0)


def coordinates_of(*groups: Group) -> dict[str, tuple[int, int]]:
    """axis → (rank, size) of groups over one axis each, for `ParamSpec.boxes`."""
    return {group.axes: (group.rank, group.size) for group in groups}
