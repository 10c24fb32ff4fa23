"""Functions of DeepSpeed's modules `runtime.utils`, `utils`, `comm` and others that programs call, by
torch and this package. deepspeed/names.py lists where they belong.
"""

import gc
import logging
import os
import random
import resource
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, partial, reduce
from typing import Any

import numpy as np
import torch
from torch import nn

from ...errors import ConfigError
from ..engine.communication import show_communication
from ..engine.engine import show
from . import comm
from .accelerator import get_accelerator
from .utils import log_dist, logger

GIB = 2**30
RECORDS = 'Write "comms_logger": {"enabled": true} in the config of initialize.'


# ---------------------------------------------------------------------- memory
def see_memory_usage(message: str, force: bool = False) -> None:
    """Print the memory of the device and of this process, on rank 0 and with `force` only."""
    if not force or comm.is_initialized() and comm.get_rank():
        return
    gc.collect()
    show(f"{message} | {memory_status()}")
    get_accelerator().reset_peak_memory_stats()


def memory_status(msg: str = "", print_rank: int = -1, reset_max: bool = False) -> str:
    """One line: allocated, largest and reserved memory of the device, resident memory of this process."""
    device = get_accelerator()
    numbers = {
        "allocated": device.memory_allocated(),
        "largest": device.max_memory_allocated(),
        "reserved": device.memory_reserved(),
        "host": _resident(),
    }
    if reset_max:
        device.reset_peak_memory_stats()
    return " ".join(
        filter(
            None,
            [msg, *(f"{name} {size / GIB:.2f} GiB" for name, size in numbers.items())],
        )
    )


get_ma_status = lambda: get_accelerator().memory_allocated()


def _resident() -> int:
    """Largest resident memory of this process so far, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def empty_cache() -> None:
    """Free unused memory of the device's allocator."""
    get_accelerator().empty_cache()


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print memory for weights, gradients and Adam's states in 16 bits at stage 2, for a module."""
    total = sum(p.numel() for p in model.parameters())
    estimate_zero2_model_states_mem_needs_all_cold(
        total, num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """The same for a number of parameters. Rajbhandari et al. 2020 (arXiv:1910.02054), section 3."""
    ranks = num_gpus_per_node * num_nodes
    rows = [
        ("offload_optimizer cpu", 2.0, 14 / ranks * num_gpus_per_node),
        ("no offload", 2.0 + 14 / ranks, 0.0),
    ]
    _show_estimates(2, total_params, rows, additional_buffer_factor, ranks)


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print memory for weights, gradients and Adam's states in 16 bits at stage 3, for a module."""
    sizes = [
        sum(p.numel() for p in m.parameters(recurse=False)) for m in model.modules()
    ]
    total = sum(p.numel() for p in model.parameters())
    estimate_zero3_model_states_mem_needs_all_cold(
        total, max(sizes), num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """The same for a number of parameters. The largest layer is whole while it is computed."""
    ranks = num_gpus_per_node * num_nodes
    layer = 4 * largest_layer_params / max(1, total_params)
    of_node = num_gpus_per_node / ranks
    rows = [
        ("offload_param cpu, offload_optimizer cpu", layer, 18 * of_node),
        ("offload_optimizer cpu", layer + 2 / ranks, 16 * of_node),
        ("no offload", layer + 18 / ranks, 0.0),
    ]
    _show_estimates(3, total_params, rows, additional_buffer_factor, ranks)


def _show_estimates(
    stage: int,
    total: int,
    rows: Sequence[tuple[str, float, float]],
    factor: float,
    ranks: int,
) -> None:
    """rows: (what, bytes of a parameter on each device, and in the memory of each node)"""
    show(
        f"ZeRO {stage}, {total / 1e6:.0f}M parameters, {ranks} ranks; per device | per node (× {factor:g})"
    )
    for what, device, host in rows:
        show(
            f"  {device * total / GIB:9.2f} GiB | {host * total * factor / GIB:9.2f} GiB | {what}"
        )


# ---------------------------------------------------------------------- partitions and numbers
def prefix_sum_inc(weights: Sequence[float]) -> list[float]:
    """Sums of the first 1, 2, … weights."""
    return np.cumsum(weights).tolist()


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """Bounds of consecutive parts whose sizes differ by at most one, the larger ones first."""
    size, larger = divmod(num_items, num_parts)
    return [part * size + min(part, larger) for part in range(num_parts + 1)]


def _heaviest(
    best: Sequence[float], sums: Sequence[float], items: int, cut: int
) -> float:
    """Return the weight of the heaviest part of the first items, whose last part begins at `cut`."""
    return max(best[cut], sums[items] - sums[cut])


def partition_balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """Bounds of consecutive parts, of which the heaviest is as light as possible."""
    sums = [0.0, *np.cumsum(weights, dtype=float).tolist()]
    n = len(weights)
    if n <= num_parts:
        return partition_uniform(n, num_parts)
    # best[i]: weight of the heaviest of the parts of the first i items; cut: where the last of them begins.
    best = sums[:]
    cuts = []
    for _ in range(num_parts - 1):
        cut = [
            min(range(i + 1), key=partial(_heaviest, best, sums, i))
            for i in range(n + 1)
        ]
        best = [_heaviest(best, sums, i, k) for i, k in enumerate(cut)]
        cuts.append(cut)
    bounds = [n]
    for cut in reversed(cuts):
        bounds.append(cut[bounds[-1]])
    return [0, *reversed(bounds)]


def get_only_unique_item(items: Iterable[Any]) -> Any:
    """Return the item, where all are equal. Raises RuntimeError otherwise."""
    found = set(items)
    if len(found) != 1:
        raise RuntimeError(
            f"one value was expected, and there are {len(found)}: {sorted(found, key=str)}"
        )
    return found.pop()


def clip_grad_norm_(
    parameters: Any, max_norm: float, norm_type: float = 2, mpu: Any = None
) -> torch.Tensor:
    """torch's function, for parameters that are whole on this rank. mpu: None only."""
    if mpu is not None:
        raise ConfigError(
            "clip_grad_norm_(mpu=…): an engine clips gradients over all ranks itself. Set "
            '"gradient_clipping" in its config.'
        )
    return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)


def get_global_norm(norm_list: Iterable[float]) -> float:
    """Norm of the concatenation of tensors with these norms."""
    return sum(norm**2 for norm in norm_list) ** 0.5


def is_model_parallel_parameter(p: torch.Tensor) -> bool:
    """Return whether the parameter is split over tensor-parallel ranks, by Megatron's attributes."""
    return bool(
        getattr(p, "model_parallel", False)
        or getattr(p, "tensor_model_parallel", False)
    )


def is_zero_param(parameter: Any) -> bool:
    """Return whether the parameter is sharded: by `zero.Init`, or by an engine at stage 3."""
    engine = getattr(parameter, "engine", lambda: None)()
    return (
        hasattr(parameter, "partition")
        or engine is not None
        and engine.gathering is not None
    )


# ---------------------------------------------------------------------- tensors, seeds, modules
def move_to_device(
    item: Any, device: Any, criterion_func: Callable[[Any], bool] | None = None
) -> Any:
    """Return the item with its tensors, in lists, tuples and dicts too, on the device; those of the criterion
    only.
    """
    if isinstance(item, torch.Tensor):
        return (
            item.to(device) if criterion_func is None or criterion_func(item) else item
        )
    return _within(item, lambda inner: move_to_device(inner, device, criterion_func))


def copy_to_device(
    item: Any, device: Any, criterion_func: Callable[[Any], bool]
) -> Any:
    """`move_to_device`, with copies."""
    if criterion_func(item):
        return item.to(device)
    return _within(item, lambda inner: copy_to_device(inner, device, criterion_func))


def clone_tensors_for_torch_save(item: Any, device: Any = "cpu") -> Any:
    """Return the item with copies of its tensors on the device, which share no memory with other tensors."""
    if isinstance(item, torch.Tensor):
        return item.detach().to(device, copy=True)
    return _within(item, lambda inner: clone_tensors_for_torch_save(inner, device))


def _within(item: Any, change: Callable[[Any], Any]) -> Any:
    kind: Callable[[Any], Any] = type(item)
    if isinstance(item, Mapping):
        return kind({key: change(value) for key, value in item.items()})
    return kind(map(change, item)) if type(item) in (list, tuple) else item


def set_random_seed(seed: int) -> None:
    """Seed the generators of Python, NumPy and torch."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class OnDevice:
    """A context in which modules are made on a device, with parameters of a number format."""

    def __init__(self, dtype: torch.dtype, device: str = "meta", enabled: bool = True):
        self._dtype = dtype
        self._device = torch.device(device)
        self._enabled = enabled

    def __enter__(self) -> "OnDevice":
        if self._enabled:
            self._before = torch.get_default_dtype()
            torch.set_default_dtype(self._dtype)
            self._device.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._enabled:
            self._device.__exit__(*error)
            torch.set_default_dtype(self._before)


@contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[nn.Module]:
    """The module of an engine, with whole parameters."""
    gathered = getattr(model, "gathered_parameters", nullcontext)
    with gathered():
        yield getattr(model, "module", model)


def recursive_getattr(model: Any, module_name: str) -> Any:
    """Return the attribute with a dotted name."""
    return reduce(getattr, module_name.split("."), model)


def recursive_setattr(model: Any, module_name: str, module: Any) -> None:
    """Set the attribute with a dotted name."""
    above, _, last = module_name.rpartition(".")
    setattr(recursive_getattr(model, above) if above else model, last, module)


# ---------------------------------------------------------------------- small
def ensure_directory_exists(filename: str) -> None:
    """Create the folder of a file."""
    os.makedirs(os.path.dirname(filename) or ".", exist_ok=True)


def call_to_str(base: str, *args: Any, **kwargs: Any) -> str:
    """Return a call as text: "f(1, b=2)"."""
    return f"{base}({', '.join([*map(repr, args), *(f'{k}={v!r}' for k, v in kwargs.items())])})"


def noop_decorator(func: Callable) -> Callable:
    """Return the function itself."""
    return func


def instrument_w_nvtx(func: Callable) -> Callable:
    """Return the function itself: torch.profiler records operations without marks."""
    return func


noop_context = nullcontext


def required_torch_version(min_version: Any = None, max_version: Any = None) -> bool:
    """Return whether torch's version is between these."""
    version = _numbers(torch.__version__)
    above = min_version is None or version >= _numbers(str(min_version))
    return above and (max_version is None or version <= _numbers(str(max_version)))


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.split("+")[0].split(".")
    found = [int(part) for part in parts if part.isdecimal()]
    return tuple(found + [0] * (3 - len(found)))


@cache
def log_dist_once(
    message: str, ranks: tuple[int, ...] | None = None, level: int = logging.INFO
) -> None:
    """`log_dist`, once for each message."""
    log_dist(message, ranks, level)


@cache
def warning_once(message: str) -> None:
    """Log a warning, once for each message."""
    logger.warning(message)


def print_dist(message: str, ranks: Sequence[int] | None = None) -> None:
    """`log_dist`."""
    log_dist(message, ranks)


def set_log_level_from_string(
    log_level_str: str, custom_logger: logging.Logger | None = None
) -> None:
    """Set the level of the logger: "debug", "info", "warning", "error" or "critical"."""
    levels = logging.getLevelNamesMapping()
    if log_level_str.upper() not in levels:
        raise ConfigError(
            f"{log_level_str!r} is no level of logging. Use debug, info, warning, error or "
            "critical."
        )
    (custom_logger or logger).setLevel(levels[log_level_str.upper()])


# ---------------------------------------------------------------------- ranks and devices
def get_local_rank_from_launcher() -> int:
    """Return the rank of this process on its machine."""
    return comm.get_local_rank()


def get_world_rank_from_launcher() -> int:
    """Return the rank of this process."""
    return comm.launching.read_launch().rank


def get_world_size_from_launcher() -> int:
    """Return the number of ranks."""
    return comm.launching.read_launch().world_size


def get_all_ranks_from_group(group: Any = None) -> list[int]:
    """Return the global ranks of a process group."""
    return comm.get_process_group_ranks(group) if comm.get_world_size() > 1 else [0]


def log_summary(show_straggler: bool = False) -> None:
    """Print the communication of rank 0 so far, of engines whose JSON has "comms_logger".

    Those that the program calls itself, by functions of this module, are rows of the group "program".

    show_straggler: with the time of each row above that of the fastest rank. Collective over all ranks then
    """
    if not show_communication(show_straggler):
        log_dist_once(f"comm.log_summary(): nothing is recorded. {RECORDS}", (0,))


def configure_comms(*args: Any, **options: Any) -> None:
    """Log that the JSON of an engine switches the communication log on."""
    log_dist_once(f"comm.configure() has no effect. {RECORDS}", (0,))


def is_current_accelerator_supported() -> bool:
    """True: the accelerator is CUDA or the CPU."""
    return True


def set_accelerator(accel_obj: Any) -> None:
    """Raises ConfigError for another accelerator than that of `get_accelerator()`."""
    if accel_obj is not get_accelerator():
        raise ConfigError(
            "set_accelerator: the accelerator is that of torch, CUDA where there is a GPU. "
            "Hide GPUs with CUDA_VISIBLE_DEVICES= to use the CPU."
        )
