"""Seconds of a message over a group of ranks.

Collectives are rings. A ring that stays on one host has the links inside it. One over several hosts crosses from host
to host once for each host: its ranks on a host share that crossing, and the adapters of all devices of the host are
shared by the rings that cross at the same time, so each rank adds its own share.
"""

import math
from collections.abc import Sequence

from ...mpu.grid import Grid
from ...mpu.group import RING_FACTOR
from .cluster import Cluster

SEND = "send"


class Links:
    """The links of the ranks of a grid, rank 0 on the first device of the first host."""

    def __init__(self, cluster: Cluster, grid: Grid, rank: int = 0):
        self.cluster = cluster
        self._grid = grid
        self._rank = rank
        self._known: dict[tuple[str, int], tuple[float, int]] = {}

    def seconds(
        self, operation: str, axes: str, size: int, nbytes: float, calls: int = 1
    ) -> float:
        """Return the seconds of `calls` messages of `nbytes` of payload together, over a group of `size` ranks."""
        if size < 2:
            return 0.0
        speed, hosts = self._speed(axes, size)
        rounds = math.ceil(math.log2(size)) if operation != SEND else 1
        steps = 2 * rounds if operation == "all_reduce" else rounds
        moved = nbytes * RING_FACTOR[operation](size)
        return moved / speed + calls * steps * self.cluster.latency

    def _speed(self, axes: str, size: int) -> tuple[float, int]:
        """(bytes/s of a ring over a group, hosts that it visits)."""
        key = axes, size
        if key not in self._known:
            self._known[key] = self._speed_of(self._ranks(axes, size))
        return self._known[key]

    def _speed_of(self, ranks: Sequence[int]) -> tuple[float, int]:
        cluster = self.cluster
        on_host: dict[int, int] = {}
        for rank in ranks:
            host = int(rank // cluster.devices_per_host)
            on_host[host] = on_host.get(host, 0) + 1
        inside = cluster.inside * cluster.link
        if len(on_host) == 1:
            return inside, 1
        crossing = cluster.outside * cluster.link * min(on_host.values())
        return min(inside, crossing), len(on_host)

    def _ranks(self, axes: str, size: int) -> Sequence[int]:
        """Return the ranks of a group. One that is no product of axes is as near together as its size allows."""
        grid = self._grid
        names = axes.split("-")
        try:
            ranks = grid.group_of(self._rank, *names)
        except (KeyError, ValueError, AttributeError):
            return range(size)
        if len(ranks) == size:
            return ranks
        return ranks[:size]
