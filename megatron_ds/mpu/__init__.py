"""Model parallel units: the coordinates of ranks on the grid, their groups, and getters with Megatron's
names.

Names load their module on first use, so the pure parts (`mpu.grid`, `mpu.param_spec`) do not import torch.
"""

from importlib import import_module

_NAMES = {
    "grid": ("Grid",),
    "group": ("Group", "coordinates_of", "solo"),
    "mesh": (
        "Mesh",
        "destroy_model_parallel",
        "get_mesh",
        "initialize_model_parallel",
        "model_parallel_is_initialized",
        "set_mesh",
    ),
    "param_spec": ("Box", "Init", "ParamSpec", "Split"),
    "channels": ("Channels",),
    "launch": ("Launch", "read_launch", "start", "stop"),
    "getters": (
        "get_tensor_model_parallel_group",
        "get_tensor_model_parallel_world_size",
        "get_tensor_model_parallel_rank",
        "get_tensor_model_parallel_src_rank",
        "get_pipeline_model_parallel_group",
        "get_pipeline_model_parallel_world_size",
        "get_pipeline_model_parallel_rank",
        "get_pipeline_model_parallel_first_rank",
        "get_pipeline_model_parallel_last_rank",
        "get_pipeline_model_parallel_next_rank",
        "get_pipeline_model_parallel_prev_rank",
        "get_virtual_pipeline_model_parallel_world_size",
        "is_pipeline_first_stage",
        "is_pipeline_last_stage",
        "get_data_parallel_group",
        "get_data_parallel_world_size",
        "get_data_parallel_rank",
        "get_data_parallel_src_rank",
        "get_context_parallel_group",
        "get_context_parallel_world_size",
        "get_context_parallel_rank",
        "get_context_parallel_global_ranks",
        "get_expert_model_parallel_group",
        "get_expert_model_parallel_world_size",
        "get_expert_model_parallel_rank",
        "get_expert_data_parallel_group",
        "get_expert_data_parallel_world_size",
        "get_expert_data_parallel_rank",
        "get_embedding_group",
        "is_rank_in_embedding_group",
        "get_model_parallel_group",
        "get_model_parallel_world_size",
        "get_model_parallel_rank",
        "get_model_parallel_src_rank",
    ),
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}

__all__ = list(_MODULE_OF)


def __getattr__(name: str):
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
