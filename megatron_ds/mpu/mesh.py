"""`Mesh`: the grid seen from one rank, with a `Group` for every set of axes that something talks over.

How groups are connected is handed in, so the same mesh runs over torch.distributed (`transport.connect_torch`) and over
threads in tests (`ThreadWorld.connect`). All ranks must make their mesh at the same time: connecting is collective.
"""

from collections.abc import Callable, Sequence

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
        self._connect, self._transports = connect, {}
        lists_of = lambda name: grid.embedding_groups() if name == "embd" else grid.groups(*name.split("-"))
        self._groups = {name: self._make_group(name, lists_of(name)) for name in AXIS_SETS}
        self._split: dict[int, tuple[Group, Group]] = {}
        self.placement = tuple(range(grid.pp))

    def group(self, *axes: str) -> Group:
        """`group("tp")`, `group("dp", "cp")` in any order, `group("world")`, `group("embd")`."""
        name = "-".join(axes)
        name = _ALIASES.get(name, name)
        assert name in self._groups, f"no group over {name!r}; there are {', '.join(self._groups)} and 'world'"
        return self._groups[name]

    def split_data(self, size: int) -> tuple[Group, Group]:
        """(inner, outer): the run of `size` data-parallel ranks that holds this one, and the ranks of equal place in all runs.

        Made when asked for, by all ranks at the same time; of one run nothing needs to be made. Raises ConfigError.
        """
        if size not in self._split:
            inner, outer = self.grid.split_data(size)
            data = self.group("dp", "cp")
            self._split[size] = (data if size == data.size else self._make_group("dp-cp-inner", inner),
                                 self._make_group("dp-cp-outer", outer))
        return self._split[size]

    @property
    def coordinates(self) -> dict[str, tuple[int, int]]:
        """axis → (position of this rank, size of the axis), for `ParamSpec.boxes`."""
        return {axis: (at, self.grid.size(axis)) for axis, at in self._coordinates.items()}

    def coordinate(self, axis: str) -> int:
        return self._coordinates[axis]

    def size(self, *axes: str) -> int:
        return self.group(*axes).size

    @property
    def world_size(self) -> int:
        return self.grid.world_size

    def place_stages(self, placement: Sequence[int]) -> None:
        """Say on which pipeline rank each stage of the model lives; until then, stage r on rank r."""
        self.placement = tuple(placement)

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages of the model on this rank."""
        return tuple(stage for stage, rank in enumerate(self.placement) if rank == self._coordinates["pp"])

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank holds the model's first stage; with several stages on a rank, among others."""
        return 0 in self.stages

    @property
    def is_last_stage(self) -> bool:
        return len(self.placement) - 1 in self.stages

    def close(self) -> None:
        """Close all process groups. The mesh cannot be used afterwards."""
        for transport in filter(None, self._transports.values()):
            getattr(transport, "close", lambda: None)()

    def _make_group(self, name: str, lists: list[tuple[int, ...]]) -> Group:
        # The decision to share looks at the groups of *all* ranks, so that every rank decides alike.
        key = tuple(lists)
        if key not in self._transports:
            needed = any(len(ranks) > 1 for ranks in lists)
            assert self._connect is not None or not needed, f"{self.world_size} ranks need a way to connect them"
            self._transports[key] = self._connect(name, lists, self.rank) if needed else None
        ranks = next(ranks for ranks in lists if self.rank in ranks)
        return Group(name, ranks, ranks.index(self.rank), self._transports[key], self.traffic)

    def __repr__(self) -> str:
        return f"Mesh(rank {self.rank} of {self.world_size}: {self.grid})"
