"""Seconds of a message over a group of ranks.

Collectives are rings. A ring that stays on one host has the links inside it. One over several hosts crosses from host
to host once for each host: its ranks on a host share that crossing, and the adapters of all devices of the host are
shared by the rings that cross at the same time, so each rank adds its own share. Ranks of one host without GPUs pass
activations through its memory: these may have a speed of their own.
"""

import math
from collections import Counter
from collections.abc import Sequence

from ...mpu.grid import Grid
from ...mpu.group import ACTIVATION_AXES, RING_FACTOR
from .cluster import Cluster

SEND = "send"


class Links:
    """The links of the ranks of a grid, rank 0 on the first device of the first host."""

    def __init__(self, cluster: Cluster, grid: Grid, rank: int = 0):
        self.cluster = cluster
        self._grid = grid
        self._rank = rank
        self._known: dict[tuple[str, int], float] = {}

    def seconds(
        self, operation: str, axes: str, size: int, nbytes: float, calls: int = 1
    ) -> float:
        """Return the seconds of `calls` messages of `nbytes` of payload together, over a group of `size` ranks."""
        if size < 2:
            return 0.0
        moved = nbytes * RING_FACTOR[operation](size)
        steps = 1
        if operation != SEND:
            steps = math.ceil(math.log2(size))
        # An all-reduce is a reduce-scatter and an all-gather.
        if operation == "all_reduce":
            steps *= 2
        waits = calls * steps * self.cluster.latency
        return moved / self._speed(axes, size) + waits

    def _speed(self, axes: str, size: int) -> float:
        """Return bytes/s of a ring over a group."""
        key = axes, size
        if key not in self._known:
            ranks = self._ranks(axes, size)
            self._known[key] = self._speed_of(ranks, axes in ACTIVATION_AXES)
        return self._known[key]

    def _speed_of(self, ranks: Sequence[int], is_activation: bool) -> float:
        cluster = self.cluster
        hosts = Counter(int(rank // cluster.devices_per_host) for rank in ranks)
        of_host = cluster.activations if is_activation else 0.0
        inside = (of_host or cluster.inside) * cluster.link
        if len(hosts) == 1:
            return inside
        outside = cluster.outside * cluster.link
        crossing = outside * min(hosts.values())
        return min(inside, crossing)

    def _ranks(self, axes: str, size: int) -> Sequence[int]:
        """Return the ranks of a group. One that is no product of axes is as near together as its size allows."""
        names = axes.split("-")
        try:
            ranks = self._grid.group_of(self._rank, *names)
        except (KeyError, ValueError, AttributeError):
            return range(size)
        return ranks[:size]
