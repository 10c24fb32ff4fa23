"""`deepspeed.checkpointing`: recomputation of activations under DeepSpeed's names, by torch.utils.checkpoint.

    megatron_ds.checkpointing.configure(mpu_=None)
    x = megatron_ds.checkpointing.checkpoint(layer, x)

Note: random numbers. torch restores the states of the CPU's and the devices' generators before it recomputes:
dropout has the same masks. Megatron's named generators of tensor-parallel ranks are not among them.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import checkpoint as of_torch

from .errors import ConfigError

# What each key of DeepSpeed's would do here, if it were asked for.
REFUSED = {"partition_activations": "activations are not split over tensor-parallel ranks",
           "contiguous_checkpointing": "torch's allocator places "
                                       "activations", "checkpoint_in_cpu": "activations "
           "stay on the "
           "device", "synchronize": "no step of recomputation needs it", "profile": "use torch.profiler"}
_state = {"configured": False}


def configure(mpu_: Any = None, deepspeed_config: Any = None, partition_activations: bool | None = None,
              contiguous_checkpointing: bool | None = None, num_checkpoints: int | None = None,
              checkpoint_in_cpu: bool | None = None, synchronize: bool | None = None,
              profile: bool | None = None) -> None:
    """Raises ConfigError for what is asked for and not there. mpu_, num_checkpoints: nothing depends on them.

    deepspeed_config: a dict whose "activation_checkpointing" has the other arguments
    """
    block = dict(deepspeed_config.get("activation_checkpointing", {})) if isinstance(deepspeed_config,
                                                                                     dict) else {}
    given = {"partition_activations": partition_activations,
             "contiguous_checkpointing": contiguous_checkpointing,
             "checkpoint_in_cpu": checkpoint_in_cpu, "synchronize": synchronize, "profile": profile}
    names = {"contiguous_memory_optimization": "contiguous_checkpointing",
             "cpu_checkpointing": "checkpoint_in_cpu",
             "synchronize_checkpoint_boundary": "synchronize"}
    asked = {names.get(key, key): value for key, value in block.items()} | {k: v for k, v in given.items() if v is not None}
    if wrong := [key for key, value in asked.items() if value and key in REFUSED]:
        raise ConfigError("; ".join(f"{key} is not supported: {REFUSED[key]}" for key in wrong) + ". Leave "
                                                                                                  "it out.")
    _state["configured"] = True


def is_configured() -> bool:
    return _state["configured"]


def reset() -> None:
    """For programs that call it after evaluation; there is nothing to free."""


def checkpoint(function: Callable, *args: Any) -> Any:
    """`function(*args)`, whose activations are computed again in backward instead of being kept.

    Non-reentrant, unlike DeepSpeed's: parameters are trained also where no argument requires a gradient.
    """
    return of_torch.checkpoint(function, *args, use_reentrant=False)


class CheckpointFunction:
    """`CheckpointFunction.apply(function, outputs, *args)`, as Megatron-DeepSpeed calls it."""

    @staticmethod
    def apply(function: Callable, outputs: list, *args: Any) -> None:
        result = checkpoint(function, *args)
        outputs.extend([result] if torch.is_tensor(result) else result)
