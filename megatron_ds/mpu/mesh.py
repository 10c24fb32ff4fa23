"""`Mesh`: the grid seen from one rank, with a `Group` for every set of axes that something talks over.

How groups are connected is handed in, so the same mesh runs over torch.distributed (`transport.connect_torch`) and over
threads in tests (`ThreadWorld.connect`). All ranks must make their mesh at the same time: connecting is collective.
"""

from collections.abc import Callable

import torch

from .grid import Grid
from .group import Group, Transport
from .traffic import Traffic

Connect = Callable[[str, list[tuple[int, ...]], int], Transport | None]

# In the order in which they are connected, the same on all ranks. "embd" joins the holders of tied embeddings.
AXIS_SETS = ("tp", "cp", "dp", "pp", "ep", "edp", "dp-cp", "tp-pp", "tp-cp-dp-pp", "embd")
_ALIASES = {"world": "tp-cp-dp-pp", "cp-dp": "dp-cp", "pp-tp": "tp-pp"}


class Mesh:
    """The groups of rank `rank`.

    connect(axes, groups, rank) → the transport of that group among `groups` which holds `rank`; it is called for sets of
    axes with groups of more than one rank only. Two sets of axes with the same groups share one transport.
    """

    def __init__(self, grid: Grid, rank: int, connect: Connect | None = None, device: torch.device | str = "cpu"):
        self.grid, self.rank, self.device = grid, rank, torch.device(device)
        self.traffic = Traffic()
        self._coordinates = grid.coordinates(rank)
        self._groups = _connect_all(grid, rank, connect, self.traffic)

    def group(self, *axes: str) -> Group:
        """`group("tp")`, `group("dp", "cp")` in any order, `group("world")`, `group("embd")`."""
        name = "-".join(axes)
        name = _ALIASES.get(name, name)
        assert name in self._groups, f"no group over {name!r}; there are {', '.join(self._groups)} and 'world'"
        return self._groups[name]

    def coordinate(self, axis: str) -> int:
        return self._coordinates[axis]

    def size(self, *axes: str) -> int:
        return self.group(*axes).size

    @property
    def world_size(self) -> int:
        return self.grid.world_size

    @property
    def is_first_stage(self) -> bool:
        return self._coordinates["pp"] == 0

    @property
    def is_last_stage(self) -> bool:
        return self._coordinates["pp"] == self.grid.pp - 1

    def close(self) -> None:
        """Hang up every transport that knows how to; the mesh is of no use afterwards."""
        transports = {id(g.transport): g.transport for g in self._groups.values() if g.transport is not None}
        for transport in transports.values():
            getattr(transport, "close", lambda: None)()

    def __repr__(self) -> str:
        return f"Mesh(rank {self.rank} of {self.world_size}: {self.grid})"


def _connect_all(grid: Grid, rank: int, connect: Connect | None, traffic: Traffic) -> dict[str, Group]:
    groups, transports = {}, {}
    for name in AXIS_SETS:
        lists = grid.embedding_groups() if name == "embd" else grid.groups(*name.split("-"))
        # The decision to share looks at the groups of *all* ranks, so that every rank decides alike.
        key = tuple(lists)
        if key not in transports:
            needed = any(len(ranks) > 1 for ranks in lists)
            assert connect is not None or not needed, f"a grid of {grid.world_size} ranks needs a way to connect them"
            transports[key] = connect(name, lists, rank) if needed else None
        ranks = next(ranks for ranks in lists if rank in ranks)
        groups[name] = Group(name, ranks, ranks.index(rank), transports[key], traffic)
    return groups
