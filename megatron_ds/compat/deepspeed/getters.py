"""The getters of Megatron-LM's parallel_state, and the six functions of an `mpu` for DeepSpeed, over
the mesh.

Groups are returned as torch ProcessGroups. A group of one rank is a ProcessGroup too, made on first use,
since torch takes `group=None` for the whole world; only where torch.distributed was not started, in a world
of one, it is None. Ranks called "first", "last", "next", "prev" and "src" are global ranks; all others are
positions in their group.

Each raises NotInitializedError before `initialize_model_parallel`.
"""

from typing import TYPE_CHECKING, cast
from weakref import WeakKeyDictionary

from ...errors import ConfigError
from ...mpu.group import Group
from ...mpu.mesh import Mesh, get_mesh

if TYPE_CHECKING:
    from ...mpu.transport import TorchTransport


def get_tensor_model_parallel_group():
    """Return the tensor-parallel group as a ProcessGroup."""
    return _process_group("tp")


def get_tensor_model_parallel_world_size() -> int:
    """Size of the tensor-parallel group."""
    return get_mesh().size("tp")


def get_tensor_model_parallel_rank() -> int:
    """Position of this rank in the tensor-parallel group."""
    return get_mesh().coordinate("tp")


def get_tensor_model_parallel_src_rank() -> int:
    """Global rank of the first rank of the tensor-parallel group."""
    return get_mesh().group("tp").ranks[0]


def get_pipeline_model_parallel_group():
    """Return the pipeline group as a ProcessGroup."""
    return _process_group("pp")


def get_pipeline_model_parallel_world_size() -> int:
    """Size of the pipeline group."""
    return get_mesh().size("pp")


def get_pipeline_model_parallel_rank() -> int:
    """Position of this rank in the pipeline group."""
    return get_mesh().coordinate("pp")


def get_pipeline_model_parallel_first_rank() -> int:
    """Global rank of the model's first stage."""
    return get_mesh().group("pp").ranks[get_mesh().placement[0]]


def get_pipeline_model_parallel_last_rank() -> int:
    """Global rank of the model's last stage; the first where a schedule folds the pipeline (zb-v)."""
    return get_mesh().group("pp").ranks[get_mesh().placement[-1]]


def get_pipeline_model_parallel_next_rank() -> int:
    """Global rank of the next position in the pipeline group; the first follows the last."""
    return _around(get_mesh().group("pp"), 1)


def get_pipeline_model_parallel_prev_rank() -> int:
    """Global rank of the previous position in the pipeline group; the last precedes the first."""
    return _around(get_mesh().group("pp"), -1)


def get_virtual_pipeline_model_parallel_world_size() -> int | None:
    """Stages of the model on each pipeline rank; None where there is one, as in Megatron."""
    mesh = get_mesh()
    chunks = len(mesh.placement) // mesh.size("pp")
    return chunks if chunks > 1 else None


def is_pipeline_first_stage(
    ignore_virtual: bool = True, vp_stage: int | None = None
) -> bool:
    """Return whether this rank holds the model's first stage; with ignore_virtual=False, in chunk `vp_stage`."""
    mesh = get_mesh()
    return mesh.is_first_stage if ignore_virtual else _chunk(mesh, vp_stage) == 0


def is_pipeline_last_stage(
    ignore_virtual: bool = True, vp_stage: int | None = None
) -> bool:
    """Return whether this rank holds the last stage, which has the loss; ignore_virtual as above."""
    mesh = get_mesh()
    return (
        mesh.is_last_stage
        if ignore_virtual
        else _chunk(mesh, vp_stage) == len(mesh.placement) - 1
    )


def get_data_parallel_group(with_context_parallel: bool = False):
    """Return the data-parallel group as a ProcessGroup; with_context_parallel: times context parallelism."""
    return _process_group(*_data(with_context_parallel))


def get_data_parallel_world_size(with_context_parallel: bool = False) -> int:
    """Size of the data-parallel group; with_context_parallel: times context parallelism."""
    return get_mesh().size(*_data(with_context_parallel))


def get_data_parallel_rank(with_context_parallel: bool = False) -> int:
    """Position of this rank in the data-parallel group; with_context_parallel: times context parallelism."""
    return get_mesh().group(*_data(with_context_parallel)).rank


def get_data_parallel_src_rank(with_context_parallel: bool = False) -> int:
    """Global rank of the first rank of the data-parallel (with_context_parallel: dp times cp) group."""
    return get_mesh().group(*_data(with_context_parallel)).ranks[0]


def get_context_parallel_group():
    """Return the context-parallel group as a ProcessGroup."""
    return _process_group("cp")


def get_context_parallel_world_size() -> int:
    """Size of the context-parallel group."""
    return get_mesh().size("cp")


def get_context_parallel_rank() -> int:
    """Position of this rank in the context-parallel group."""
    return get_mesh().coordinate("cp")


def get_context_parallel_global_ranks() -> list[int]:
    """Global ranks of the context-parallel group."""
    return list(get_mesh().group("cp").ranks)


def get_expert_model_parallel_group():
    """Return the expert-parallel group as a ProcessGroup."""
    return _process_group("ep")


def get_expert_model_parallel_world_size() -> int:
    """Size of the expert-parallel group."""
    return get_mesh().size("ep")


def get_expert_model_parallel_rank() -> int:
    """Position of this rank in the expert-parallel group."""
    return get_mesh().coordinate("ep")


def get_expert_model_parallel_src_rank() -> int:
    """Global rank of the first rank of the expert-parallel group."""
    return get_mesh().group("ep").ranks[0]


def get_expert_tensor_parallel_group():
    """Return the ranks that divide each expert as a ProcessGroup: the tensor-parallel group, if no other size was
    asked for."""
    return _process_group("etp")


def get_expert_tensor_parallel_world_size() -> int:
    """Number of ranks that divide each expert."""
    return get_mesh().size("etp")


def get_expert_tensor_parallel_rank() -> int:
    """Position of this rank among those that divide each expert."""
    return get_mesh().coordinate("etp")


def get_expert_tensor_and_model_parallel_group():
    """Return the ranks that hold all experts of a layer together as a ProcessGroup."""
    return _process_group("etp", "ep")


def get_expert_tensor_and_model_parallel_world_size() -> int:
    """Number of ranks that hold all experts of a layer together."""
    return get_mesh().size("etp", "ep")


def get_expert_tensor_and_model_parallel_rank() -> int:
    """Position of this rank among those that hold all experts of a layer together."""
    return get_mesh().group("etp", "ep").rank


def get_expert_data_parallel_group():
    """Return the ranks with the same experts as a ProcessGroup."""
    return _process_group("edp")


def get_expert_data_parallel_world_size() -> int:
    """Number of ranks with the same experts."""
    return get_mesh().size("edp")


def get_expert_data_parallel_rank() -> int:
    """Position of this rank among those with the same experts."""
    return get_mesh().coordinate("edp")


def get_embedding_group():
    """Return the ranks of the first and the last stage, which both hold a tied embedding.

    Every other rank is alone in its group, and so are all ranks where one rank holds both stages.
    """
    placement = get_mesh().placement
    return _process_group("embd") if placement[0] != placement[-1] else _lone_group()


def is_rank_in_embedding_group() -> bool:
    """Return whether this rank holds the first or the last stage."""
    return get_mesh().is_first_stage or get_mesh().is_last_stage


# "Model parallel" means tensor times pipeline parallelism in the following functions, so that model size x
# data size (with context) is the world size, as DeepSpeed expects. In Megatron-DeepSpeed the group means
# both, rank and size tensor parallelism alone.


def get_model_parallel_group():
    """Return the group of tensor times pipeline parallelism."""
    return _process_group("tp", "pp")


def get_model_parallel_world_size() -> int:
    """Size of the group of tensor times pipeline parallelism."""
    return get_mesh().size("tp", "pp")


def get_model_parallel_rank() -> int:
    """Position of this rank in the group of tensor times pipeline parallelism."""
    return get_mesh().group("tp", "pp").rank


def get_model_parallel_src_rank() -> int:
    """Global rank of the first rank of the group of tensor times pipeline parallelism."""
    return get_mesh().group("tp", "pp").ranks[0]


# Mesh → process group of its rank.
_alone: WeakKeyDictionary[Mesh, object] = WeakKeyDictionary()


def _process_group(*axes: str):
    mesh = get_mesh()
    transport = mesh.group(*axes).transport
    if transport is None:
        return _lone_group()
    return cast("TorchTransport", transport).process_group


def _lone_group():
    mesh = get_mesh()
    if mesh not in _alone:
        from ...mpu.transport import lone_process_group

        _alone[mesh] = lone_process_group(mesh.rank)
    return _alone[mesh]


def _chunk(mesh: Mesh, vp_stage: int | None) -> int:
    """Return the stage of the model that is this rank's chunk `vp_stage`."""
    stages = mesh.stages
    if vp_stage is None and len(stages) == 1:
        vp_stage = 0
    if vp_stage is None or not 0 <= vp_stage < len(stages):
        raise ConfigError(
            f"vp_stage={vp_stage}: this rank holds {len(stages)} stages of the model, numbered "
            f"0 to {len(stages) - 1}. Give one of these numbers, or query the rank with "
            "ignore_virtual=True."
        )
    return stages[vp_stage]


def _data(with_context_parallel: bool) -> tuple[str, ...]:
    return ("dp", "cp") if with_context_parallel else ("dp",)


def _around(group: Group, steps: int) -> int:
    return group.ranks[(group.rank + steps) % group.size]
