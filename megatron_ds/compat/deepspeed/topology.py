"""`deepspeed.pipe.ProcessTopology`: ranks ↔ coordinates of a grid with named axes, for programs that compute
with them. Ranks are numbered with the last axis fastest. An engine takes the groups of its `mpu`.

    topology = ProcessTopology(["pipe", "data"], [2, 4])
    topology.get_rank(pipe=1, data=0)           # 4
    topology.get_axis_comm_lists("pipe")        # [[0, 4], [1, 5], [2, 6], [3, 7]]
"""

from collections import namedtuple
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

from ...errors import ConfigError


def _coordinates(axes: Sequence[str]) -> Callable[..., Any]:
    return namedtuple("ProcessCoord", axes)


class ProcessTopology:
    """A grid of ranks. ProcessCoord: the class of coordinates, a named tuple with an element for each axis."""

    def __init__(self, axes: Sequence[str], dims: Sequence[int]):
        """axes: names, the slowest first; dims: their sizes."""
        if len(axes) != len(dims) or min(dims, default=0) < 1:
            raise ConfigError(
                f"axes {list(axes)} with sizes {list(dims)}: each axis has one size, at least 1."
            )
        self.axes = list(axes)
        self.dims = list(dims)
        self.ProcessCoord = _coordinates(self.axes)
        places = product(*map(range, dims))
        self.mapping: dict[Any, int] = {
            self.ProcessCoord(*place): rank for rank, place in enumerate(places)
        }
        self._places = list(self.mapping)

    def world_size(self) -> int:
        """Return the number of ranks."""
        return len(self.mapping)

    def get_rank(self, **coordinates: int) -> int:
        """Return the rank at a place. Raises ConfigError unless there is one value for each axis, in its range."""
        if set(coordinates) == set(self.axes):
            place = self.ProcessCoord(**coordinates)
            if place in self.mapping:
                return self.mapping[place]
        sizes = dict(zip(self.axes, self.dims))
        raise ConfigError(
            f"there is no rank at {coordinates} in a grid of {sizes}. Give one place for each axis."
        )

    def get_coord(self, rank: int) -> Any:
        """Return the place of a rank."""
        return self._places[rank]

    def get_axis_names(self) -> list[str]:
        """Return the axes, the slowest first."""
        return self.axes

    def get_dim(self, axis: str) -> int:
        """Return the size of an axis; 0 for one that the grid has not."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def filter_match(self, **coordinates: int) -> list[int]:
        """Return the ranks at these values of some axes, in ascending order."""
        wanted = coordinates.items()
        return [
            rank
            for rank, place in enumerate(self._places)
            if all(getattr(place, axis) == value for axis, value in wanted)
        ]

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """Return the ranks at one value of an axis."""
        return self.filter_match(**{axis: idx})

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """Return the groups along an axis, which have equal values of all others; [] for an axis it has not."""
        if axis not in self.axes:
            return []
        groups: dict[tuple[int, ...], list[int]] = {}
        at = self.axes.index(axis)
        for rank, place in enumerate(self._places):
            groups.setdefault((*place[:at], *place[at + 1 :]), []).append(rank)
        return list(groups.values())

    def get_rank_repr(
        self,
        rank: int,
        omit_axes: Sequence[str] = ("data", "pipe"),
        inner_sep: str = "_",
        outer_sep: str = "-",
    ) -> str:
        """Return the place of a rank as a part of a file's name: "model_01"."""
        place = self._places[rank]
        shown = [axis for axis in self.axes if axis not in omit_axes]
        return outer_sep.join(
            f"{axis}{inner_sep}{getattr(place, axis):02d}" for axis in shown
        )

    def __str__(self) -> str:
        return str(self.mapping)


class PipeDataParallelTopology(ProcessTopology):
    """Pipeline stages, and data-parallel ranks next to each other."""

    def __init__(self, num_pp: int, num_dp: int):
        super().__init__(["pipe", "data"], [num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """Pipeline stages, then data-parallel ranks, and tensor-parallel ranks next to each other."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int):
        super().__init__(["pipe", "data", "model"], [num_pp, num_dp, num_mp])
