"""Counters of what the collectives of this process move, per operation and group.

Bytes are *payload per rank*: for an all-reduce and an all-to-all the size of the tensor, for an all-gather
the size of the gathered result, for a reduce-scatter the size of the full input, for point-to-point messages
their size. An all-to-all of unequal pieces (`all_to_all_v`) counts what goes to other ranks, since that
depends on the sizes. `RING_FACTOR` converts payload to the bytes that a rank of a ring sends (`wire_bytes`).
"""

from collections import Counter
from dataclasses import dataclass, field

RING_FACTOR = {            # bytes sent by one rank of a ring of n, per byte of payload
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "all_to_all_v": lambda n: 1.0,
    "broadcast": lambda n: 1.0,
    "send": lambda n: 1.0,
}


@dataclass
class Traffic:
    """Payload bytes and calls, keyed by (operation, group axes, group size)."""

    bytes: Counter = field(default_factory=Counter)
    calls: Counter = field(default_factory=Counter)

    def add(self, operation: str, axes: str, size: int, num_bytes: int, calls: int = 1) -> None:
        """Count calls with `num_bytes` in total."""
        self.bytes[operation, axes, size] += num_bytes
        self.calls[operation, axes, size] += calls

    def add_all(self, other: "Traffic", times: int = 1) -> None:
        """Count what `other` counted, `times` times."""
        for key, num_bytes in other.bytes.items():
            self.add(*key, times * num_bytes, times * other.calls[key])

    def clear(self) -> None:
        """Set all counters to zero."""
        self.bytes.clear()
        self.calls.clear()

    def wire_bytes(self) -> dict[tuple[str, str, int], float]:
        """Bytes a rank sends when every collective is a ring."""
        return {(op, axes, n): count * RING_FACTOR[op](n) for (op, axes, n), count in self.bytes.items()}
