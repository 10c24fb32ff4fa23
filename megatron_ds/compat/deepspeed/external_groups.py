"""`DataParallelWorld`: the groups of a user's program, for an engine that trains a module as a whole.

The argument `mpu` of `megatron_ds.initialize` is one of:

    None       torch.distributed as started, else the launcher's environment; all ranks are data-parallel
    a Mesh     or `megatron_ds.mpu` itself after `initialize_model_parallel`
    an `mpu`   any object with the six functions that DeepSpeed calls; its process groups are used unchanged

Expert parallelism: a Mesh with `ep`, or a seventh function of the `mpu`, Megatron-core's
`get_expert_data_parallel_group`: the data-parallel ranks that hold the same experts as this one.
"""

import atexit
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ...errors import ConfigError
from ...mpu import launch as launching
from ...mpu.collectives import all_gather_object
from ...mpu.grid import cut_groups
from ...mpu.group import Group, Traffic, solo
from ...mpu.mesh import (
    Mesh,
    default_device,
    get_mesh,
    initialize_model_parallel,
    model_parallel_is_initialized,
    set_mesh,
)
from ...mpu.param_spec import DATA_AXES, EXPERT_DATA_AXES

FUNCTIONS = (
    "get_model_parallel_rank",
    "get_model_parallel_group",
    "get_model_parallel_world_size",
    "get_data_parallel_rank",
    "get_data_parallel_group",
    "get_data_parallel_world_size",
)
SEVENTH = "get_expert_data_parallel_group"
_adopted: dict[str, Any] = {}
# A mesh with data-parallel ranks alone → size of tensor-parallel groups → the mesh of engines with such groups.
_divided: WeakKeyDictionary[Mesh, dict[int, Mesh]] = WeakKeyDictionary()


@dataclass(frozen=True)
class DataParallelWorld:
    """The groups of this rank.

    data         ranks that hold the same part of the model and train on different samples
    model        ranks that hold one copy of the model together
    mesh         the Mesh of these groups, None if they are a user's process groups
    expert       the ranks of `data` that hold the same experts as this one; None without expert parallelism
    expert_part  the part of the experts they hold, of data.size / expert.size, numbered by first data rank
    ep           the ranks of `data` that hold all experts together, if made by `with_experts`
    """

    data: Group
    model: Group
    world: Group
    device: torch.device
    mesh: Mesh | None = None
    expert: Group | None = None
    expert_part: int = 0
    ep: Group | None = None

    @property
    def of_experts(self) -> Group:
        """The group `expert`, of a module that has marked experts: `check_experts` has found that it is known."""
        assert self.expert is not None
        return self.expert

    def split_data(self, size: int) -> tuple[Group, Group]:
        """(inner, outer), as `Mesh.split_data`. Collective over all ranks."""
        if self.mesh is not None:
            return self.mesh.split_data(size)
        from ...mpu.process_groups import connect_torch

        groups = sorted(set(all_gather_object(self.data.ranks, self.world)))
        made = []
        for axes, lists in zip(
            ("dp-cp-inner", "dp-cp-outer"), cut_groups(groups, size)
        ):
            ranks = next(ranks for ranks in lists if self.rank in ranks)
            made.append(
                Group(
                    axes,
                    ranks,
                    ranks.index(self.rank),
                    connect_torch(axes, lists, self.rank),
                    self.traffic,
                )
            )
        return made[0], made[1]

    def connect_apart(self, group: Group, purpose: str) -> Group:
        """Return the ranks of a group with a transport of their own (`Mesh.connect_apart`). Collective over
        all ranks.
        """
        if self.mesh is not None:
            return self.mesh.connect_apart(group, purpose)
        from ...mpu.process_groups import connect_torch

        lists = sorted(set(all_gather_object(group.ranks, self.world)))
        name = f"{group.axes}-{purpose}"
        return replace(group, transport=connect_torch(name, lists, self.rank))

    def with_experts(self, size: int) -> "DataParallelWorld":
        """These groups, and expert-parallel groups of `size` consecutive ranks of `data`. Collective over all ranks."""
        ep, expert = self.split_data(size)
        return replace(self, expert=expert, expert_part=ep.rank, ep=ep)

    def expert_parallel(self) -> Group:
        """Return the ranks that hold all experts together, in the order of their parts: those of equal position in
        the groups `expert`. Collective over all ranks.
        """
        if self.ep is not None or self.expert is None:
            return self.ep or solo("ep", self.rank)
        if self.mesh is not None:
            return self.mesh.group("ep")
        from ...mpu.process_groups import connect_torch

        given = sorted(
            set(
                all_gather_object(
                    (self.data.ranks, self.expert_part, self.expert.ranks), self.world
                )
            )
        )
        parts: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        for data, _, ranks in given:
            parts.setdefault(data, []).append(ranks)
        lists = [group for of_data in parts.values() for group in zip(*of_data)]
        ranks = next(group for group in lists if self.rank in group)
        transport = connect_torch("ep", lists, self.rank)
        return Group("ep", ranks, ranks.index(self.rank), transport, self.traffic)

    @property
    def traffic(self) -> Traffic:
        """What all of these groups count in."""
        return self.world.traffic

    @property
    def expert_parts(self) -> int:
        """The size of expert parallelism: the number of parts into which the experts are divided."""
        return self.data.size // self.expert.size if self.expert else 1

    @property
    def coordinates(self) -> dict[str, tuple[int, int]]:
        """axis → (position of this rank, size of the axis), for `ParamSpec.boxes`."""
        of_layers = self.model.rank, self.model.size
        return {
            "tp": of_layers,
            "etp": of_layers,
            "ep": (self.expert_part, self.expert_parts),
        }

    @property
    def by_axes(self) -> dict[tuple[str, ...], Group]:
        """`ParamSpec.reduced_over` → the group that sums such gradients."""
        return {DATA_AXES: self.data, EXPERT_DATA_AXES: self.expert or self.data}

    @property
    def rank(self) -> int:
        """Global rank of this process."""
        return self.world.ranks[self.world.rank]


def join_world(mpu: Any = None, tensor_parallel: int = 1) -> DataParallelWorld:
    """Return the groups of `mpu`; see above. Collective over all ranks where groups must be made.

    tensor_parallel  the size of tensor-parallel groups that are made where there is no `mpu`
    Raises ConfigError when `mpu` lacks one of the functions or has pipeline stages.
    """
    if mpu is None and tensor_parallel > 1:
        return _of_mesh(_mesh_of_groups(tensor_parallel))
    if mpu is None:
        return _of_mesh(_mesh_of_all_ranks())
    if isinstance(mpu, Mesh):
        return _of_mesh(mpu)
    if getattr(mpu, "__name__", None) == __package__:
        return _of_mesh(get_mesh())
    return _of_functions(mpu)


def tensor_parallel_group(size: int) -> Group:
    """Return the group of this rank among tensor-parallel groups of `size`, made where there are none. Collective
    over all ranks.

    Raises ConfigError where `size` does not divide the ranks, or the mesh has groups of another size.
    """
    import torch.distributed as dist

    if not model_parallel_is_initialized():
        if not dist.is_initialized():
            launching.start(launching.read_launch())
            atexit.register(launching.stop)
        initialize_model_parallel(tensor_model_parallel_size=size)
    mesh = get_mesh()
    if mesh.size("tp") != size:
        raise ConfigError(
            f"The mesh is {mesh.grid}, whose tensor-parallel groups are not of {size} ranks. Give its "
            "size, or no mesh before."
        )
    return mesh.group("tp")


def adopted_mpu() -> Any | None:
    """Return the object with DeepSpeed's functions that `join_world` was given last, None if there was none."""
    return _adopted.get("mpu")


def has_process_group() -> bool:
    """Return whether torch.distributed was started or is not needed: there is one rank."""
    import torch.distributed as dist

    return (
        model_parallel_is_initialized()
        or dist.is_initialized()
        or launching.read_launch().world_size == 1
    )


def _mesh_of_groups(size: int) -> Mesh:
    """Return a mesh with tensor-parallel groups of `size`: the process's, or one beside it for engines of their own."""
    if model_parallel_is_initialized():
        mesh = get_mesh()
        is_plain = mesh.size("dp") == mesh.world_size
        if is_plain and mesh.world_size > 1:
            made = _divided.setdefault(mesh, {})
            if size not in made:
                made[size] = initialize_model_parallel(size)
                set_mesh(mesh)
            return made[size]
    tensor_parallel_group(size)
    return get_mesh()


def _mesh_of_all_ranks() -> Mesh:
    import torch.distributed as dist

    if model_parallel_is_initialized():
        mesh = get_mesh()
        if mesh.size("dp") != mesh.world_size:
            raise ConfigError(
                f"The mesh is {mesh.grid}, but no mpu was given, which makes all ranks "
                "data-parallel. Pass mpu=megatron_ds.mpu."
            )
        return mesh
    if not dist.is_initialized():
        launching.start(launching.read_launch(), alone=True)
        atexit.register(launching.stop)  # `TorchTransport.close` has the reason
    return initialize_model_parallel()


def _of_mesh(mesh: Mesh) -> DataParallelWorld:
    _check_stages(mesh.size("pp"))
    if mesh.grid.folds:
        raise ConfigError(
            f"The mesh is {mesh.grid}, but the engine divides experts over the ranks of dense layers. Make a mesh "
            "whose etp is its tp."
        )
    expert = mesh.group("edp") if mesh.size("ep") > 1 else None
    return DataParallelWorld(
        mesh.reduction,
        mesh.group("tp"),
        mesh.group("world"),
        mesh.device,
        mesh,
        expert,
        mesh.coordinate("ep"),
    )


def _of_functions(mpu: Any) -> DataParallelWorld:
    missing = [name for name in FUNCTIONS if not callable(getattr(mpu, name, None))]
    if missing:
        raise ConfigError(
            f"mpu lacks {', '.join(missing)}: an mpu is an object with the functions "
            f"{', '.join(FUNCTIONS)}, or a megatron_ds Mesh. Leave it out where all ranks are "
            "data-parallel."
        )
    _check_stages(getattr(mpu, "get_pipeline_model_parallel_world_size", lambda: 1)())
    _adopted["mpu"] = mpu
    # One count of all groups.
    traffic = Traffic()
    data = _adopt(
        "dp-cp",
        mpu.get_data_parallel_group(),
        mpu.get_data_parallel_world_size(),
        traffic,
    )
    model = _adopt(
        "tp",
        mpu.get_model_parallel_group(),
        mpu.get_model_parallel_world_size(),
        traffic,
    )
    size = data.size * model.size
    world = _adopt("tp-cp-dp-pp", None, size, traffic)
    return DataParallelWorld(
        data, model, world, default_device(), None, *_experts_of(mpu, data, world)
    )


def _experts_of(mpu: Any, data: Group, world: Group) -> tuple[Group | None, int]:
    """(expert, expert_part) of a `DataParallelWorld`. Collective over the world where the mpu has the
    function.

    Raises ConfigError, on all ranks, unless the groups are parts of the data group, of equal size and
    without overlap.
    """
    if not callable(getattr(mpu, SEVENTH, None)):
        return None, 0
    import torch.distributed as dist

    process_group = getattr(mpu, SEVENTH)()
    expert = _adopt(
        "edp",
        process_group,
        dist.get_world_size(process_group) if dist.is_initialized() else 1,
        world.traffic,
    )
    # The parts of each data group must cover it.
    given = all_gather_object((data.ranks, expert.ranks), world)
    parts = {
        ranks: sorted({theirs for of, theirs in given if of == ranks})
        for ranks, _ in given
    }
    for ranks, found in parts.items():
        covered = sorted(rank for part in found for rank in part)
        if covered != sorted(ranks) or len({len(part) for part in found}) > 1:
            shown = ", ".join(str(list(part)) for part in found)
            raise ConfigError(
                f"{SEVENTH}() of the mpu gives the groups {shown} to the data-parallel ranks "
                f"{list(ranks)}: each of these ranks must be in exactly one group, and all "
                "groups must have one size. Make the groups from the data-parallel group."
            )
    return expert, parts[data.ranks].index(expert.ranks)


def group_of(process_group: Any) -> Group:
    """Return a data-parallel Group over torch's process group."""
    import torch.distributed as dist

    size = dist.get_world_size(process_group)
    return _adopt("dp-cp", process_group, size, Traffic())


def _adopt(axes: str, process_group: Any, size: int, traffic: Traffic) -> Group:
    """Return a Group over an existing process group; None is the whole world, as in torch."""
    import torch.distributed as dist

    if size == 1:
        return solo(axes, dist.get_rank() if dist.is_initialized() else 0)
    from ...mpu.process_groups import transport_over

    over = process_group or dist.group.WORLD
    ranks = tuple(dist.get_process_group_ranks(over))
    if len(ranks) != size:
        raise ConfigError(
            f"mpu gives {size} as the size of its {axes} group, but the process group has "
            f"{len(ranks)} ranks. Correct the mpu: the two must be equal, and "
            "data-parallel size × model-parallel size must be the world size."
        )
    transport = transport_over(over, axes)
    return Group(axes, ranks, dist.get_rank(over), transport, traffic)


def _check_stages(stages: int) -> None:
    if stages > 1:
        raise ConfigError(
            f"mpu has {stages} pipeline stages, but an engine runs a module as a whole. Use "
            "data and tensor parallelism, or pretrain_gpt.py for pipelines."
        )
