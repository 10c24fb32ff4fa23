"""Layers with experts of a user's module, connected to an engine: DeepSpeed's `MoE`, with its expert-parallel
ranks, and the routers of `MixtureOfExperts`, whose memories (`moe.balance`) move after each update.
"""

import weakref
from collections.abc import Iterator

import torch
from torch import nn

from ...errors import ConfigError
from ...mpu.agree import on_all_ranks
from ...mpu.agreement import require_agreement
from ...mpu.collectives import all_gather_object, broadcast_
from ...mpu.grid import divisors
from ...mpu.group import Group, solo
from ..deepspeed.external_groups import DataParallelWorld
from ..deepspeed.moe_layer import MoE, RoutingPlace
from .status import EngineStatus


def expert_layers(module: nn.Module) -> Iterator[tuple[str, MoE]]:
    """Name and layer, each layer once."""
    return (
        (name, layer)
        for name, layer in module.named_modules()
        if isinstance(layer, MoE)
    )


def with_expert_ranks(module: nn.Module, world: DataParallelWorld) -> DataParallelWorld:
    """Return the world with the expert-parallel groups of the module's layers, where the mpu has none: as in
    DeepSpeed, runs of ep_size consecutive data-parallel ranks.

    Collective over all ranks. Raises ConfigError, on all ranks, for sizes that the ranks do not allow.
    """
    size = on_all_ranks(world.world, lambda: _ep_size(module, world))
    require_agreement(
        world.world,
        lambda: {"ep_size of the MoE layers": (size, "")},
        "the ranks gave initialize different modules",
        "Make the same module on every rank.",
    )
    return world if size == 1 or world.expert is not None else world.with_experts(size)


def _ep_size(module: nn.Module, world: DataParallelWorld) -> int:
    # All layers with experts on several ranks have one size.
    names = {
        layer.ep_size: name
        for name, layer in expert_layers(module)
        if layer.ep_size > 1
    }
    if not names:
        return 1
    if len(names) > 1:
        raise ConfigError(
            f"MoE layers have different ep_size: {names}. An engine has one expert-parallel "
            "size: use one in all layers, or 1 in some."
        )
    [(size, name)] = names.items()
    # It divides the data-parallel ranks.
    if world.data.size % size:
        legal = ", ".join(map(str, divisors(world.data.size)))
        raise ConfigError(
            f"MoE layer {name or 'of the model'} has ep_size={size}, but there are "
            f"{world.data.size} data-parallel ranks. ep_size is the number of ranks that "
            "divide the experts, not the number of experts, so it must divide the "
            f"data-parallel ranks. Use ep_size {legal}."
        )
    # It is that of the mpu's groups.
    if world.expert is not None and world.expert_parts != size:
        raise ConfigError(
            f"MoE layer {name or 'of the model'} has ep_size={size}, but the mpu has "
            f"expert-parallel groups of {world.expert_parts} ranks. Use ep_size "
            f"{world.expert_parts} or 1, or an mpu with groups of {size}."
        )
    return size


def connect_layers(engine: EngineStatus) -> None:
    """Give each layer its ranks, and the seed and the number of the micro-batch for its random numbers.

    Collective over all ranks.
    """
    layers = list(expert_layers(engine.module))
    if not layers:
        return
    world = engine.world
    divided = any(layer.ep_size > 1 for _, layer in layers)
    ep: Group = world.expert_parallel() if divided else solo("ep")
    seed = all_gather_object(torch.initial_seed(), world.world)[0]
    clock = _Clock(engine)
    for name, layer in layers:
        layer.connect(
            RoutingPlace(
                ep if layer.ep_size > 1 else solo("ep"),
                (seed, name),
                clock,
                world.model.size,
            )
        )


def connect_routers(engine: EngineStatus) -> None:
    """Give all ranks the memories of data-parallel rank 0. Collective over all ranks."""
    for piece in engine.step_state.pieces():
        broadcast_(piece.tensor, engine.world.data)


class _Clock:
    """The number of the present micro-batch, as in one process that computes those of all ranks in turn."""

    def __init__(self, engine: EngineStatus):
        self._engine = weakref.ref(engine)

    def __call__(self) -> int:
        engine = self._engine()
        return (
            0
            if engine is None
            else engine.micro_steps * engine.world.data.size + engine.world.data.rank
        )
