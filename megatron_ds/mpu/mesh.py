"""`Mesh`: the grid seen from one rank, with a `Group` for any set of axes, connected on first use.

How groups are connected is a parameter, so the same mesh runs over torch.distributed
(`process_groups.connect_torch`), over threads (in tests) and without peers (`fake_group.py`).

The mesh of the process (`get_mesh`) is for training scripts, tools and the getters of Megatron and DeepSpeed.
Layers never read it; they receive their groups as arguments. It is in a ContextVar, so that ranks which are
threads of one process have one each. A thread started later has none: call `set_mesh` in it.

Note: order of connecting. Connecting is collective over the world, since torch numbers process groups in the
order in which they are made. So all ranks must first ask for groups in the same order. This holds wherever
code asks while a run is being built, as layers and optimizers do: all ranks run the same code, and `connect`
is called for groups that some ranks alone may ask for later, such as those that getters return.
Asking again is never collective.
"""

from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import replace
from datetime import timedelta

import torch

from ..errors import ConfigError, NotInitializedError
from .grid import DEFAULT_ORDER, Grid, cut_groups
from .group import ACTIVATION_AXES, Group, Traffic, Transport

Connect = Callable[[str, list[tuple[int, ...]], int], Transport | None]

# Names of groups list their axes in this order. The exception is "dp-cp", a name that logs and plans contain.
_ORDER = ("tp", "cp", "etp", "ep", "edp", "dp", "pp")
_SAMPLES = ("dp",)
_REDUCTION = ("dp", "cp")
_WORLD = "tp-cp-dp-pp"


class Mesh:
    """The groups of rank `rank`.

    connect(axes, groups, rank) → the transport of that group among `groups` which holds `rank`; it is called
    for sets of axes with groups of more than one rank only. Two sets of axes with the same groups share one
    transport, except for the world where activations pass through memory.
    """

    def __init__(
        self,
        grid: Grid,
        rank: int,
        connect: Connect | None = None,
        device: torch.device | str = "cpu",
    ):
        self.grid = grid
        self.rank = rank
        self.device = torch.device(device)
        self.traffic = Traffic()
        self._coordinates = grid.coordinates(rank)
        self._connect = connect
        self._transports: dict[tuple, Transport | None] = {}
        self._groups: dict[str, Group] = {}
        self._lists: dict[str, list[tuple[int, ...]]] = {}
        self._split: dict[tuple[str, int], tuple[Group, Group]] = {}
        self.placement = tuple(range(grid.pp))

    def group(self, *axes: str) -> Group:
        """`group("tp")`, `group("dp", "cp")` in any order, `group("world")`, `group("embd")` (holders of tied
        embeddings).

        Collective over the world when these axes are first asked for. Raises ConfigError for unknown axes.
        """
        name = self._name_of(axes)
        if name not in self._groups:
            lists = (
                self.grid.embedding_groups()
                if name == "embd"
                else self.grid.groups(*name.split("-"))
            )
            self._groups[name] = self._make_group(name, lists)
        return self._groups[name]

    def connect(self, axis_sets: Iterable[tuple[str, ...]]) -> None:
        """Connect the groups over these sets of axes, in this order. Collective over the world."""
        for axes in axis_sets:
            self.group(*axes)

    @property
    def samples(self) -> Group:
        """Ranks that read different samples."""
        return self.group(*_SAMPLES)

    @property
    def reduction(self) -> Group:
        """Ranks over which gradients are summed: they hold the same parameters and see different tokens."""
        return self.group(*_REDUCTION)

    def split_data(self, size: int) -> tuple[Group, Group]:
        """(inner, outer): the run of `size` ranks of `reduction` that holds this one, and the ranks of equal
        position in all runs. Collective over the world when first asked for. Raises ConfigError.
        """
        return self.split(size, *_REDUCTION)

    def split(self, size: int, *axes: str) -> tuple[Group, Group]:
        """(inner, outer): the run of `size` ranks of the group over these axes that holds this one, and the
        ranks of equal position in all runs. Collective over the world when first asked for. Raises
        ConfigError."""
        name = self._name_of(axes)
        whole = self.group(*axes)
        if (name, size) not in self._split:
            inner, outer = cut_groups(self.grid.groups(*axes), size)
            run = (
                whole
                if size == whole.size
                else self._make_group(f"{name}-inner", inner)
            )
            self._split[name, size] = run, self._make_group(f"{name}-outer", outer)
        return self._split[name, size]

    def connect_apart(self, group: Group, purpose: str) -> Group:
        """Return the ranks of a group of this mesh with a transport of their own: messages of the one do not wait for
        those of the other. Collective over the world when first asked for.

        purpose: a word for messages of errors
        """
        if all(len(ranks) == 1 for ranks in self._lists[group.axes]):
            return group
        key = (purpose, *self._lists[group.axes])
        if key not in self._transports:
            connect = self._connector
            self._transports[key] = connect(
                f"{group.axes}-{purpose}", self._lists[group.axes], self.rank
            )
        return replace(group, transport=self._transports[key])

    @property
    def coordinates(self) -> dict[str, tuple[int, int]]:
        """axis → (position of this rank, size of the axis), for `ParamSpec.boxes`."""
        return {
            axis: (at, self.grid.size(axis)) for axis, at in self._coordinates.items()
        }

    def coordinate(self, axis: str) -> int:
        """Position of this rank on an axis."""
        return self._coordinates[axis]

    def size(self, *axes: str) -> int:
        """Ranks of the group over these axes; connects nothing."""
        return self.grid.size(*self._name_of(axes).split("-"))

    @property
    def world_size(self) -> int:
        """Ranks of the grid."""
        return self.grid.world_size

    def place_stages(self, placement: Sequence[int]) -> None:
        """Set the pipeline rank of each stage of the model; until then, stage r is on rank r."""
        self.placement = tuple(placement)

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages of the model on this rank."""
        return tuple(
            stage
            for stage, rank in enumerate(self.placement)
            if rank == self._coordinates["pp"]
        )

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank holds the model's first stage; with several stages on a rank, among others."""
        return 0 in self.stages

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank holds the model's last stage, which has the loss."""
        return len(self.placement) - 1 in self.stages

    def close(self) -> None:
        """Close all process groups. The mesh cannot be used afterwards."""
        for transport in filter(None, self._transports.values()):
            getattr(transport, "close", lambda: None)()

    def _name_of(self, axes: Sequence[str]) -> str:
        return _name_of(self.grid.known(axes))

    @property
    def _connector(self) -> Connect:
        assert self._connect is not None, "a mesh of several ranks needs connect="
        return self._connect

    def _make_group(self, name: str, lists: list[tuple[int, ...]]) -> Group:
        # Whether a transport is shared depends on the groups of *all* ranks, so that every rank decides
        # alike.
        key: tuple = tuple(lists)
        self._lists[name] = lists
        if name == _WORLD and self._passes_activations_through_memory():
            key = (_WORLD, *lists)
        if key not in self._transports:
            needed = any(len(ranks) > 1 for ranks in lists)
            self._transports[key] = (
                self._connector(name, lists, self.rank) if needed else None
            )
        ranks = next(ranks for ranks in lists if self.rank in ranks)
        return Group(
            name, ranks, ranks.index(self.rank), self._transports[key], self.traffic
        )

    def _passes_activations_through_memory(self) -> bool:
        """Return whether all ranks are one group that sends activations, without GPUs: its transport is not that of
        the world, which is connected first, and sends messages."""
        sizes = [self.grid.size(axis) for axis in ACTIVATION_AXES]
        return self.device.type == "cpu" and self.world_size in sizes

    def __repr__(self) -> str:
        return f"Mesh(rank {self.rank} of {self.world_size}: {self.grid})"


def _name_of(axes: Sequence[str]) -> str:
    """One name for a set of axes in any order."""
    if tuple(axes) == ("world",):
        return _WORLD
    if set(axes) == set(_REDUCTION):
        return "-".join(_REDUCTION)
    return "-".join(
        sorted(
            axes, key=lambda axis: _ORDER.index(axis) if axis in _ORDER else len(_ORDER)
        )
    )


# Groups that a getter may return on some ranks only, so they are connected on all ranks
# before.
GETTER_GROUPS = (
    ("tp",),
    ("cp",),
    ("dp",),
    ("pp",),
    ("etp",),
    ("ep",),
    ("edp",),
    ("etp", "ep"),
    ("dp", "cp"),
    ("tp", "cp"),
    ("tp", "pp"),
    ("world",),
    ("embd",),
)

_MESH: ContextVar[Mesh | None] = ContextVar("mesh", default=None)


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    *,
    context_parallel_size: int = 1,
    expert_model_parallel_size: int = 1,
    expert_tensor_parallel_size: int | None = None,
    order: str = DEFAULT_ORDER,
    timeout: timedelta | None = None,
    device: torch.device | str | None = None,
) -> Mesh:
    """Make the mesh of all ranks of torch.distributed, or of this process alone where it was not started.

    Data parallelism takes the remaining ranks. expert_tensor_parallel_size: ranks that divide each expert; None: those
    that divide dense layers. Collective over all ranks. Raises ConfigError when the sizes do not divide the world size.
    """
    import torch.distributed as dist

    etp = expert_tensor_parallel_size
    if etp is not None and etp < 1:
        raise ConfigError(
            f"expert_tensor_parallel_size={etp}: the size of a parallel axis is a whole number, at least 1. Leave it "
            "out where experts are divided as dense layers are."
        )

    # A process that no launcher started is a world of its own.
    joined = dist.is_available() and dist.is_initialized()
    world_size, rank = (dist.get_world_size(), dist.get_rank()) if joined else (1, 0)
    grid = Grid.fit(
        world_size,
        tp=tensor_model_parallel_size,
        cp=context_parallel_size,
        ep=expert_model_parallel_size,
        pp=pipeline_model_parallel_size,
        order=order,
        etp=etp or 0,
    )
    mesh = Mesh(
        grid,
        rank,
        _connect(timeout) if world_size > 1 else None,
        device or default_device(),
    )
    mesh.connect(GETTER_GROUPS)
    set_mesh(mesh)
    return mesh


def set_mesh(mesh: Mesh | None) -> None:
    """Set the mesh of this context, the calling thread."""
    _MESH.set(mesh)


def get_mesh() -> Mesh:
    """Return the mesh. Raises NotInitializedError before `initialize_model_parallel` or `set_mesh`."""
    mesh = _MESH.get()
    if mesh is None:
        raise NotInitializedError(
            "the process has no mesh yet, so there are no groups to query. Call "
            "mpu.initialize_model_parallel(...) first; in a new thread, call "
            "mpu.set_mesh(mesh)."
        )
    return mesh


def model_parallel_is_initialized() -> bool:
    """Return whether this context has a mesh."""
    return _MESH.get() is not None


def destroy_model_parallel() -> None:
    """Close the mesh's process groups and unset it; torch.distributed stays initialised."""
    if (mesh := _MESH.get()) is not None:
        mesh.close()
    set_mesh(None)


def _connect(timeout: timedelta | None):
    from .process_groups import connect_torch

    return lambda axes, groups, rank: connect_torch(axes, groups, rank, timeout)


def default_device() -> torch.device:
    """torch's current GPU, the CPU without one."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
