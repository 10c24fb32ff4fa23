"""The getters that users of Megatron-LM know, and the six functions that DeepSpeed asks of an `mpu`, answered from the mesh.

Groups come as torch ProcessGroups. A group of one rank is one too, made when asked for, since torch takes `group=None` for
the whole world; only where torch.distributed was not started, in a world of one, is it None. Ranks called "first", "last",
"next", "src" are global ranks; all others are positions in their group.

Each raises NotInitializedError before `initialize_model_parallel`.
"""

from weakref import WeakKeyDictionary

from .group import Group
from .mesh import Mesh
from .state import get_mesh


def get_tensor_model_parallel_group():
    return _process_group("tp")


def get_tensor_model_parallel_world_size() -> int:
    return get_mesh().size("tp")


def get_tensor_model_parallel_rank() -> int:
    return get_mesh().coordinate("tp")


def get_tensor_model_parallel_src_rank() -> int:
    return get_mesh().group("tp").ranks[0]


def get_pipeline_model_parallel_group():
    return _process_group("pp")


def get_pipeline_model_parallel_world_size() -> int:
    return get_mesh().size("pp")


def get_pipeline_model_parallel_rank() -> int:
    return get_mesh().coordinate("pp")


def get_pipeline_model_parallel_first_rank() -> int:
    return get_mesh().group("pp").ranks[0]


def get_pipeline_model_parallel_last_rank() -> int:
    return get_mesh().group("pp").ranks[-1]


def get_pipeline_model_parallel_next_rank() -> int:
    """Global rank of the stage after this one; the first stage comes after the last."""
    return _around(get_mesh().group("pp"), 1)


def get_pipeline_model_parallel_prev_rank() -> int:
    return _around(get_mesh().group("pp"), -1)


def is_pipeline_first_stage() -> bool:
    return get_mesh().is_first_stage


def is_pipeline_last_stage() -> bool:
    return get_mesh().is_last_stage


def get_data_parallel_group(with_context_parallel: bool = False):
    return _process_group(*_data(with_context_parallel))


def get_data_parallel_world_size(with_context_parallel: bool = False) -> int:
    return get_mesh().size(*_data(with_context_parallel))


def get_data_parallel_rank(with_context_parallel: bool = False) -> int:
    return get_mesh().group(*_data(with_context_parallel)).rank


def get_data_parallel_src_rank(with_context_parallel: bool = False) -> int:
    return get_mesh().group(*_data(with_context_parallel)).ranks[0]


def get_context_parallel_group():
    return _process_group("cp")


def get_context_parallel_world_size() -> int:
    return get_mesh().size("cp")


def get_context_parallel_rank() -> int:
    return get_mesh().coordinate("cp")


def get_context_parallel_global_ranks() -> list[int]:
    return list(get_mesh().group("cp").ranks)


def get_expert_model_parallel_group():
    return _process_group("ep")


def get_expert_model_parallel_world_size() -> int:
    return get_mesh().size("ep")


def get_expert_model_parallel_rank() -> int:
    return get_mesh().coordinate("ep")


def get_expert_data_parallel_group():
    return _process_group("edp")


def get_expert_data_parallel_world_size() -> int:
    return get_mesh().size("edp")


def get_expert_data_parallel_rank() -> int:
    return get_mesh().coordinate("edp")


def get_embedding_group():
    """First and last stage, which both hold a tied embedding; a stage in between is alone in its group."""
    return _process_group("embd")


def is_rank_in_embedding_group() -> bool:
    return get_mesh().is_first_stage or get_mesh().is_last_stage


# "Model parallel" is tensor and pipeline together for all three, so that model size x data size (with context) = world,
# which DeepSpeed relies on. Megatron-DeepSpeed means both for the group but tensor alone for rank and size.


def get_model_parallel_group():
    return _process_group("tp", "pp")


def get_model_parallel_world_size() -> int:
    return get_mesh().size("tp", "pp")


def get_model_parallel_rank() -> int:
    return get_mesh().group("tp", "pp").rank


def get_model_parallel_src_rank() -> int:
    return get_mesh().group("tp", "pp").ranks[0]


_alone: WeakKeyDictionary[Mesh, object] = WeakKeyDictionary()      # mesh → the process group of its rank alone


def _process_group(*axes: str):
    mesh = get_mesh()
    transport = mesh.group(*axes).transport
    if transport is not None:
        return transport.process_group
    if mesh not in _alone:
        from .transport import lone_process_group

        _alone[mesh] = lone_process_group(mesh.rank)
    return _alone[mesh]


def _data(with_context_parallel: bool) -> tuple[str, ...]:
    return ("dp", "cp") if with_context_parallel else ("dp",)


def _around(group: Group, steps: int) -> int:
    return group.ranks[(group.rank + steps) % group.size]
