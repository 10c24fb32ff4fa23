"""AutoTP: an engine divides a model over tensor-parallel ranks before it trains it, and `tp_model_init`.

    engine, *_ = initialize(model=model, config={"tensor_parallel": {"autotp_size": 2}, …})

The division is that of compat/division. Cut parameters have Megatron's marks, from which module_specs.py makes their
specs; norm, clipping, ZeRO and checkpoints follow from the specs. All ranks of one tensor-parallel group compute the
same micro-batches (same_batches.py). A model of shards (`zero.Init`) is whole on each rank while it is divided.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from ...errors import ArgumentError, ConfigError, MegatronDSError
from ...mpu.agree import on_all_ranks
from ...mpu.agreement import require_agreement
from ..deepspeed.external_groups import DataParallelWorld
from ..division.equal_weights import take_weights_of_first
from ..division.gradient_proof import Gradients, gradients_of, mark_partial_gradients
from ..division.layer_specs import Division, division_of
from ..division.split_layers import is_cut, split
from ..division.split_proof import require_same_results, results_of, shapes_reported
from .engine import show
from .json_settings import block_of
from .pipeline_module import PipelineModule
from .same_batches import watch_first_batch
from .tensor_parallel_keys import (
    BLOCK,
    SIZE,
    WITHOUT_EFFECT,
    DivisionKeys,
    division_keys,
)
from .zero_init import become_whole, partitions_of

logger = logging.getLogger(__name__)

# Attributes of a module: what tp_model_init was given, and over how many ranks the module is divided.
ASKED = "tp_model_init_arguments"
DIVIDED = "divided_over"


@dataclass(frozen=True)
class TensorParallelWish:
    """Over how many ranks the model is to be divided.

    keys   of the JSON
    dtype  that of `tp_model_init`, None without it
    """

    keys: DivisionKeys = DivisionKeys()
    dtype: torch.dtype | None = None

    @property
    def size(self) -> int:
        """The number of tensor-parallel ranks."""
        return self.keys.size


def tp_model_init(
    model: nn.Module,
    tp_size: int,
    dtype: torch.dtype | None = None,
    config: Mapping[str, Any] | str | None = None,
    **options: Any,
) -> nn.Module:
    """Note that `initialize` is to divide the model over `tp_size` ranks; returns the model, unchanged.

    dtype   the format that the config of `initialize` must ask for
    config  checked only: it must not ask for another size
    Raises ConfigError for another size in `config`, and for a process group `tp_group`, in place of which `initialize`
    takes mpu=.
    """
    if not isinstance(model, nn.Module) or type(tp_size) is not int or tp_size < 1:
        raise ArgumentError(
            f"tp_model_init({type(model).__name__}, {tp_size!r}): give a torch module and the number of ranks."
        )
    given = [key for key, value in options.items() if value is not None]
    if given:
        raise ConfigError(
            f"tp_model_init: {', '.join(given)} is not available. Give initialize the process groups as mpu=, or leave "
            "it out."
        )
    # The config, if it is given here as well, must not ask for another size.
    asked = division_keys(*block_of(config or {}))
    if asked.size not in (1, tp_size):
        raise ConfigError(
            f'tp_model_init: tp_size is {tp_size}, and "{BLOCK}.{SIZE}" of the config {asked.size}. Give one size.'
        )
    vars(model)[ASKED] = (tp_size, dtype)
    return model


def wish_of(config: Any, model: nn.Module) -> TensorParallelWish:
    """Return what the config and `tp_model_init` ask for. Not collective.

    A config that cannot be read asks for nothing: `read_settings` reports it, on all ranks. Raises ConfigError.
    """
    try:
        name, block = block_of(config)
    except (MegatronDSError, OSError):
        return TensorParallelWish()
    keys = division_keys(name, block)
    size, dtype = vars(model).get(ASKED, (1, None))
    if keys.size > 1 and size not in (1, keys.size):
        raise ConfigError(
            f'{name}: "{BLOCK}.{SIZE}" is {keys.size}, and tp_model_init was given {size}. Give one size.'
        )
    return TensorParallelWish(keys if keys.size > 1 else DivisionKeys(size), dtype)


def require_format(wish: TensorParallelWish, dtype: torch.dtype) -> None:
    """Raises ConfigError unless parameters have the format that `tp_model_init` was given."""
    if wish.dtype not in (None, dtype):
        raise ConfigError(
            f"tp_model_init was given {wish.dtype}, and the config asks for parameters in {dtype}. Give both the same: "
            'the blocks "bf16" and "fp16" of the config set the format.'
        )


def divide(
    model: nn.Module, wish: TensorParallelWish, world: DataParallelWorld
) -> None:
    """Divide the model over the ranks of `world.model`, in place. Collective over all ranks.

    Raises ConfigError, on all ranks, where the model cannot be divided, or would compute something else.
    """
    require_agreement(
        world.world,
        lambda: {f"{BLOCK}.{SIZE}": (wish.size, "")},
        "the ranks gave initialize different configurations",
        "Give all ranks the same.",
    )
    on_all_ranks(world.world, lambda: _check(model, wish, world))
    if wish.size == 1:
        return
    if vars(model).get(DIVIDED, 1) == 1:
        _divide_once(model, wish, world)
    watch_first_batch(model, world.model)


def _divide_once(
    model: nn.Module, wish: TensorParallelWish, world: DataParallelWorld
) -> None:
    become_whole(model)
    different = take_weights_of_first(model, world.model, world.device)
    modes = {module: module.training for module in model.modules()}
    model.eval()
    _divide_checked(model, wish, world)
    for module, mode in modes.items():
        module.training = mode
    vars(model)[DIVIDED] = wish.size
    if world.rank == 0:
        _report(model, wish, different)


def _divide_checked(
    model: nn.Module, wish: TensorParallelWish, world: DataParallelWorld
) -> None:
    """Divide a model in evaluation mode, and compare it with what it was."""
    group = world.model
    division, results, gradients = on_all_ranks(
        world.world, lambda: _whole_of(model, wish)
    )
    plan = division.plan
    on_all_ranks(world.world, partial(split, model, plan, group, division.packed))
    model.to(world.device)
    require_same_results(model, results)
    if gradients is not None:
        with shapes_reported(type(model).__name__):
            mark_partial_gradients(model, gradients, plan, group)


def _whole_of(
    model: nn.Module, wish: TensorParallelWish
) -> tuple[Division, torch.Tensor | None, Gradients | None]:
    """Return the plan, and the results and gradients of the whole model. Raises ConfigError."""
    division = division_of(model, wish.keys.rules, wish.size)
    return division, results_of(model), gradients_of(model, division.plan)


def _check(
    model: nn.Module, wish: TensorParallelWish, world: DataParallelWorld
) -> None:
    kind = type(model).__name__
    divided = vars(model).get(DIVIDED, 1)
    if divided != 1 and divided != wish.size:
        raise ConfigError(
            f'{kind} was divided over {divided} ranks by an earlier engine, and "{BLOCK}.{SIZE}" is {wish.size}. Give '
            "the same size, or make a new model."
        )
    if wish.size == 1 or divided != 1:
        return
    # The groups, and a model with whole parameters.
    if world.model.size != wish.size:
        raise ConfigError(
            f'"{BLOCK}.{SIZE}" is {wish.size}, and the mpu has {world.model.size} model-parallel ranks. Give the '
            "size of the groups of the mpu, or no mpu."
        )
    if isinstance(model, PipelineModule):
        raise ConfigError(
            f'{kind} is a PipelineModule, whose layers "{BLOCK}.{SIZE}" does not divide. Leave it out.'
        )
    partitions = partitions_of(model)
    for name, p in model.named_parameters():
        if p.is_meta and p not in partitions:
            raise ConfigError(
                f'{name} has no values: "{BLOCK}.{SIZE}" divides a model that each rank holds as a whole, or in '
                "shards of zero.Init. Make it on a real device, or under zero.Init."
            )
        if is_cut(p):
            raise ConfigError(
                f"{name} is marked as a part of a tensor-parallel parameter: the model is divided already. Leave "
                f'"{BLOCK}.{SIZE}" out, and give mpu= with the groups that divided it.'
            )


def _report(model: nn.Module, wish: TensorParallelWish, different: list[str]) -> None:
    for key in wish.keys.unused:
        show(f'"{BLOCK}.{key}" has no effect: {WITHOUT_EFFECT[key]}.')
    if different:
        logger.warning(
            "%d weights of %s, first %s, differed between tensor-parallel ranks: all have those of the first rank now",
            len(different),
            type(model).__name__,
            different[0],
        )
