"""`deepspeed.utils`, for programs that import it. This package does not use it."""

import sys
from collections.abc import Sequence
from logging import INFO, getLogger
from typing import Any

from ... import foreign_name
from ...mpu.launch import read_launch
from ..engine import RepeatingLoader
from ..engine.leaf_modules import (
    get_z3_leaf_modules,
    set_z3_leaf_module,
    set_z3_leaf_modules,
    set_z3_leaf_modules_by_name,
    set_z3_leaf_modules_by_suffix,
    unset_z3_leaf_modules,
    z3_leaf_module,
)
from .modules import NamesFirst
from .tensor_fragment import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
    safe_update_full_grad_vectorized,
)

__all__ = [
    "RepeatingLoader",
    "get_z3_leaf_modules",
    "log_dist",
    "logger",
    "print_rank_0",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "safe_update_full_grad_vectorized",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "set_z3_leaf_modules_by_name",
    "set_z3_leaf_modules_by_suffix",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
]

logger = getLogger("megatron_ds")
sys.modules[__name__].__class__ = NamesFirst


def __getattr__(name: str) -> Any:
    return foreign_name("megatron_ds.utils", name)


def log_dist(
    message: str, ranks: Sequence[int] | None = None, level: int = INFO
) -> None:
    """Log on these ranks, on all if `ranks` is None or contains -1; also before there is a process group."""
    rank = read_launch().rank
    if ranks is None or -1 in ranks or rank in ranks:
        logger.log(level, "[Rank %d] %s", rank, message)


def print_rank_0(message: str) -> None:
    """Log on rank 0."""
    log_dist(message, [0])
