"""`deepspeed.checkpointing`: recomputation of activations under DeepSpeed's names, by torch.utils.checkpoint.

    megatron_ds.checkpointing.configure(mpu_=None)
    x = megatron_ds.checkpointing.checkpoint(layer, x)

Note: random numbers. torch restores its generators of the CPU and the devices before it recomputes, so
dropout has the same masks; and `checkpoint` restores the states of `get_cuda_rng_tracker()`. Generators that
a program makes otherwise, such as Megatron's for tensor-parallel ranks, are not restored.
"""

import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint as of_torch

from ... import foreign_name
from ...errors import ConfigError
from ...host.waiting_tensors import WaitingTensor, WaitingTensors
from ..config.deepspeed_json import load_json
from .random_states import NAME, RandomStates

# Argument that is not supported → why it is not needed.
REFUSED = {
    "partition_activations": "activations are not split over tensor-parallel ranks",
    "contiguous_checkpointing": "torch's allocator places activations",
    "synchronize": "no step of recomputation needs it",
    "profile": "use torch.profiler",
}
_state: dict[str, Any] = {"configured": False, "in_cpu": False, "mpu": None}
_tracker = RandomStates()
# The distance from the seed to that of tensor-parallel rank 0, as in Megatron.
TENSOR_PARALLEL_OFFSET = 2718
_waiting = WaitingTensors()


def configure(
    mpu_: Any = None,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Check DeepSpeed's arguments. Raises ConfigError for those that are set and not supported.

    mpu_: gives the tensor-parallel rank to `model_parallel_cuda_manual_seed`
    num_checkpoints: has no effect
    checkpoint_in_cpu: tensors of a GPU that are arguments of `checkpoint` wait in host memory
    deepspeed_config: a dict whose "activation_checkpointing" contains the other arguments, or the path of its file
    """
    # The block of the config has other names for some arguments.
    block = _block_of(deepspeed_config)
    given = {
        "partition_activations": partition_activations,
        "contiguous_checkpointing": contiguous_checkpointing,
        "checkpoint_in_cpu": checkpoint_in_cpu,
        "synchronize": synchronize,
        "profile": profile,
    }
    names = {
        "contiguous_memory_optimization": "contiguous_checkpointing",
        "cpu_checkpointing": "checkpoint_in_cpu",
        "synchronize_checkpoint_boundary": "synchronize",
    }
    # Arguments replace the keys of the block.
    requested = {names.get(key, key): value for key, value in block.items()}
    requested |= {key: value for key, value in given.items() if value is not None}
    if wrong := [key for key, value in requested.items() if value and key in REFUSED]:
        raise ConfigError(
            "; ".join(f"{key} is not supported: {REFUSED[key]}" for key in wrong)
            + ". Remove it."
        )
    _state.update(
        configured=True,
        mpu=mpu_ or _state["mpu"],
        in_cpu=bool(requested.get("checkpoint_in_cpu")),
    )


def _block_of(config: Any) -> Mapping[str, Any]:
    """Return the block "activation_checkpointing" of a JSON. Raises ConfigError."""
    if config is None:
        return {}
    if isinstance(config, str | os.PathLike):
        config = load_json(os.fspath(config), "deepspeed_config")
    if not isinstance(config, Mapping):
        raise ConfigError(
            f"deepspeed_config is {type(config).__name__}: give the JSON as a dict, or the path of its file."
        )
    return config.get("activation_checkpointing") or {}


def is_configured() -> bool:
    """Return whether `configure` has been called."""
    return _state["configured"]


def reset() -> None:
    """Does nothing: there is nothing to free. Programs call it after evaluation."""


def checkpoint(function: Callable, *args: Any) -> Any:
    """`function(*args)`. Its activations are computed again in backward instead of being kept.

    Does not re-enter autograd: parameters receive gradients also if no argument requires one.
    """
    with saved_tensors_hooks(_away, _back) if _state["in_cpu"] else nullcontext():
        return of_torch.checkpoint(
            function, *args, use_reentrant=False, context_fn=_same_states
        )


def _same_states() -> tuple[Any, Any]:
    """Contexts of the forward and of its recomputation, which begins with the same random states."""
    return nullcontext(), _tracker.at(_tracker.get_states())


def non_reentrant_checkpoint(function: Callable, *args: Any) -> Any:
    """`checkpoint`."""
    return checkpoint(function, *args)


def get_cuda_rng_tracker() -> RandomStates:
    """Return the random states by name, which `checkpoint` restores for its recomputation."""
    return _tracker


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed torch with `seed`, and the state of tensor-parallel regions with another one for each rank."""
    mpu = _state["mpu"]
    name = next(
        (
            n
            for n in ("get_tensor_model_parallel_rank", "get_model_parallel_rank")
            if hasattr(mpu, n)
        ),
        None,
    )
    rank = 0 if name is None else getattr(mpu, name)()
    _tracker.reset()
    torch.manual_seed(seed)
    _tracker.add(NAME, seed + TENSOR_PARALLEL_OFFSET + rank)


def __getattr__(name: str) -> Any:
    return foreign_name("megatron_ds.checkpointing", name)


def _away(x: torch.Tensor) -> torch.Tensor | tuple[WaitingTensor, bool]:
    return x if x.device.type == "cpu" else (_waiting.put(x, _waiting), x.requires_grad)


def _back(kept: torch.Tensor | tuple[WaitingTensor, bool]) -> torch.Tensor:
    if isinstance(kept, torch.Tensor):
        return kept
    waiting, requires_grad = kept
    return _waiting.take(waiting).requires_grad_(requires_grad)


class CheckpointFunction:
    """`CheckpointFunction.apply(function, outputs, *args)`, as Megatron-DeepSpeed calls it."""

    @staticmethod
    def apply(function: Callable, outputs: list, *args: Any) -> None:
        """Append the result, or its elements, to `outputs`."""
        result = checkpoint(function, *args)
        outputs.extend([result] if torch.is_tensor(result) else result)
