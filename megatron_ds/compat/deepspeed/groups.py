"""`deepspeed.utils.groups`: process groups, sizes and positions under DeepSpeed's names.

The groups are those of the `mpu` that was given to `initialize`, else those of `megatron_ds.mpu`; before
both, all ranks are data-parallel. In a program of one rank without a process group they are None.
"""

from collections.abc import Callable
from typing import Any

import torch

from ... import mpu
from ...errors import ConfigError
from ...mpu.mesh import model_parallel_is_initialized
from . import comm
from .external_groups import adopted_mpu


def _ask(kind: str, what: str, alone: Callable[[], Any]) -> Any:
    """`get_<kind>_parallel_<what>` of the mpu; `alone()` where there is none, or it has no such function."""
    source = adopted_mpu() or (mpu if model_parallel_is_initialized() else None)
    function = getattr(source, f"get_{kind}_parallel_{what}", None)
    return alone() if function is None else function()


def get_data_parallel_group() -> Any:
    """Return the ranks that hold the same part of the model and train on different samples."""
    return _ask("data", "group", comm.get_world_group)


def get_data_parallel_world_size() -> int:
    """Return the number of data-parallel ranks."""
    return _ask("data", "world_size", comm.get_world_size)


def get_data_parallel_rank() -> int:
    """Return the position of this rank among them."""
    return _ask("data", "rank", comm.get_rank)


def get_model_parallel_group() -> Any:
    """Return the ranks that hold one copy of the model together."""
    return _ask("model", "group", _lone)


def get_model_parallel_world_size() -> int:
    """Return the number of these ranks."""
    return _ask("model", "world_size", lambda: 1)


def get_model_parallel_rank() -> int:
    """Return the position of this rank among them."""
    return _ask("model", "rank", lambda: 0)


def get_tensor_model_parallel_group() -> Any:
    """Return the tensor-parallel ranks."""
    return _ask("tensor_model", "group", get_model_parallel_group)


def get_tensor_model_parallel_world_size() -> int:
    """Return the number of tensor-parallel ranks."""
    return _ask("tensor_model", "world_size", get_model_parallel_world_size)


def get_tensor_model_parallel_rank() -> int:
    """Return the position of this rank among them."""
    return _ask("tensor_model", "rank", get_model_parallel_rank)


def get_tensor_model_parallel_src_rank() -> int:
    """Return the global rank of the first tensor-parallel rank."""
    return _ask(
        "tensor_model",
        "src_rank",
        lambda: comm.get_rank() - get_tensor_model_parallel_rank(),
    )


def get_expert_parallel_group(group_name: str = "") -> Any:
    """Return the ranks that hold all experts together."""
    return _ask("expert_model", "group", _lone)


def get_expert_parallel_world_size(group_name: str = "") -> int:
    """Return the number of these ranks."""
    return _ask("expert_model", "world_size", lambda: 1)


def get_expert_parallel_rank(group_name: str = "") -> int:
    """Return the position of this rank among them."""
    return _ask("expert_model", "rank", lambda: 0)


def get_expert_data_parallel_group(group_name: str = "") -> Any:
    """Return the ranks that hold the same experts."""
    return _ask("expert_data", "group", get_data_parallel_group)


def get_expert_data_parallel_world_size(group_name: str = "") -> int:
    """Return the number of ranks that hold the same experts."""
    return _ask("expert_data", "world_size", get_data_parallel_world_size)


def get_expert_data_parallel_rank(group_name: str = "") -> int:
    """Return the position of this rank among them."""
    return _ask("expert_data", "rank", get_data_parallel_rank)


def get_sequence_parallel_group() -> Any:
    """Return the ranks that share one sequence. Raises ConfigError where the mpu has none."""

    def refuse() -> None:
        raise ConfigError(
            "there is no sequence-parallel group: give initialize an mpu with "
            "get_sequence_parallel_group, or pretrain_gpt.py --context-parallel-size."
        )

    return _ask("sequence", "group", refuse)


def get_sequence_parallel_world_size() -> int:
    """Return the number of ranks that share one sequence; 1 without sequence parallelism."""
    return _ask("sequence", "world_size", lambda: 1)


def get_sequence_parallel_rank() -> int:
    """Return the position of this rank among them."""
    return _ask("sequence", "rank", lambda: 0)


def get_sequence_data_parallel_group() -> Any:
    """Return the ranks over which an engine averages gradients."""
    return _ask("sequence_data", "group", get_data_parallel_group)


def get_sequence_data_parallel_world_size() -> int:
    """Return the number of these ranks."""
    return _ask("sequence_data", "world_size", get_data_parallel_world_size)


def get_sequence_data_parallel_rank() -> int:
    """Return the position of this rank among them."""
    return _ask("sequence_data", "rank", get_data_parallel_rank)


def get_world_group() -> Any:
    """All ranks."""
    return comm.get_world_group()


def get_world_size() -> int:
    """Return the number of ranks."""
    return comm.get_world_size()


def get_global_rank() -> int:
    """Return the rank of this process."""
    return comm.get_rank()


def get_broadcast_src_rank() -> int:
    """Return the global rank of the first data-parallel rank."""
    return _first_of(get_data_parallel_group())


def get_max_expert_size() -> int:
    """Return the number of ranks that hold all experts together."""
    return get_expert_parallel_world_size()


def initialize(ep_size: int = 1, mpu: Any = None) -> None:
    """No effect: `initialize` of the engine forms the groups of experts. Raises ConfigError with an mpu."""
    if mpu is not None:
        raise ConfigError(
            "groups.initialize(mpu=…): give the mpu to megatron_ds.initialize."
        )


def get_expert_parallel_ranks(
    world_size: int,
    tensor_parallel_size_: int,
    expert_parallel_size_: int,
    pipeline_parallel_size_: int = 1,
    use_data_before_expert_parallel_: bool = False,
) -> tuple[list[list[int]], list[list[int]]]:
    """(ranks that hold different experts, ranks that hold the same), where tensor-parallel ranks are neighbours
    and a stage has consecutive ranks.

    use_data_before_expert_parallel_: neighbours in the data-parallel group hold the same experts
    Raises ConfigError where the sizes do not divide the ranks.
    """
    others = tensor_parallel_size_ * pipeline_parallel_size_
    if world_size % others or world_size // others % expert_parallel_size_:
        raise ConfigError(
            f"{world_size} ranks are not divisible by tp {tensor_parallel_size_} × pp "
            f"{pipeline_parallel_size_} × ep {expert_parallel_size_}. Use sizes whose product divides them."
        )
    grid = torch.arange(world_size).view(
        pipeline_parallel_size_, -1, tensor_parallel_size_
    )
    lines = grid.transpose(1, 2).flatten(0, 1)  # [stages × tp, dp]
    expert = []
    replicas = []
    for line in lines:
        parts = line.view(-1, expert_parallel_size_)
        if use_data_before_expert_parallel_:
            parts = line.view(expert_parallel_size_, -1).T
        expert += parts.tolist()
        replicas += parts.T.tolist()
    return expert, replicas


def bwc_tensor_model_parallel_rank(mpu: Any = None) -> int:
    """Return the tensor-parallel rank by an mpu of any version of Megatron; 0 without one."""
    return _old(mpu, "rank", 0)


def bwc_tensor_model_parallel_world_size(mpu: Any = None) -> int:
    """Return the number of tensor-parallel ranks by an mpu; 1 without one."""
    return _old(mpu, "world_size", 1)


def bwc_tensor_model_parallel_group(mpu: Any = None) -> Any:
    """Return the tensor-parallel group of an mpu; None without one."""
    return _old(mpu, "group", None)


def bwc_pipeline_parallel_world_size(mpu: Any = None) -> int:
    """Return the number of pipeline stages of an mpu; 1 without one."""
    for name in (
        "get_pipeline_model_parallel_world_size",
        "get_pipe_parallel_world_size",
    ):
        if hasattr(mpu, name):
            return getattr(mpu, name)()
    return 1


def bwc_pipeline_parallel_group(mpu: Any = None) -> Any:
    """Return the pipeline group of an mpu; None without one."""
    for name in ("get_pipeline_model_parallel_group", "get_pipe_parallel_group"):
        if hasattr(mpu, name):
            return getattr(mpu, name)()
    return None


def _old(mpu: Any, what: str, alone: Any) -> Any:
    names = (
        f"get_{kind}_parallel_{what}" for kind in ("tensor_model", "slice", "model")
    )
    function = next((getattr(mpu, name) for name in names if hasattr(mpu, name)), None)
    return alone if function is None else function()


def _lone() -> Any:
    """Return a group of this rank; None without a process group."""
    return (
        mpu.get_tensor_model_parallel_group()
        if model_parallel_is_initialized()
        else None
    )


def _first_of(group: Any) -> int:
    return 0 if group is None else comm.get_process_group_ranks(group)[0]


def __getattr__(name: str) -> Any:
    """DeepSpeed's names with an underscore: `_get_data_parallel_group`."""
    if name.startswith("_get_") and name[1:] in globals():
        return globals()[name[1:]]
    raise AttributeError(
        f"deepspeed.utils.groups.{name} is not known here. docs/use/engine.md lists "
        "DeepSpeed's names."
    )
