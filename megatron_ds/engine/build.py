"""`initialize`: from a module and DeepSpeed's JSON to an `Engine`."""

import os
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import nn

from ..config import RunConfig
from ..errors import ConfigError
from ..mpu.customer import DataParallelWorld, join_world
from ..mpu.group import solo
from ..optim import OPTIMIZERS
from ..training.build import bucket_elements
from ..training.dtypes import DTYPES
from ..training.offloading import make_offload
from ..training.together import together
from ..zero.optimizer import DataGroups, LayerPlan, ZeroOptimizer
from ..zero.policy import policy_of
from ..zero.scaler import make_scaler
from .engine import Engine
from .layers import ModuleLayer, find_layers
from .module_gathering import ModuleGathering
from .passports import Decays, DrawByName, agree, prepare, write_passports
from .settings import read_settings


def initialize(*, model: nn.Module, config: Mapping[str, Any] | str | os.PathLike, mpu: Any = None,
               decay: Decays | None = None, draw: DrawByName | None = None) -> Engine:
    """An engine that trains `model`, any torch module, as `config` says. Collective over all ranks.

    config  DeepSpeed's JSON, as a dict or the path of a file; docs/flags.md lists the keys
    mpu     None: all ranks are data-parallel. Else an object with DeepSpeed's six functions, or a Mesh
    decay   decay(name, parameter): whether weight decay applies to it. None: to all, as in DeepSpeed;
            `lambda name, p: p.dim() > 1` leaves out biases and norms, as Megatron does
    draw    draw(name, start, out) fills `out` with elements of a parameter or buffer that is on the meta device: for a module
            that is larger than a rank. At stage 3 each rank asks for its own part only

    Takes over the module: its parameters become views of the optimizer's buffers, in the format of the config, with the values
    that data-parallel rank 0 has. Raises ConfigError with everything that is wrong with the config.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model is {type(model).__name__}, not a torch module: an engine needs its parameters.")
    world = join_world(mpu)
    settings = read_settings(config, world.data.size)
    prepare(model, DTYPES[settings.optimizer.params_dtype], world.device, draw)
    write_passports(model, world, decay)
    agree(model, world)
    layers = find_layers(model) if settings.zero.stage == 3 else []
    groups = _data_groups(settings, world)
    # Together: a rank's disk may be full, or its file of weights missing.
    optimizer = together(world.world, lambda: _make_optimizer(model, settings, world, groups, layers, draw))
    gathering = optimizer.gathering_of(0) if layers else None
    hooks = ModuleGathering(model, layers, gathering, settings.zero.prefetch_bucket_size) if gathering else None
    return Engine(model, settings, world, optimizer, hooks)


def _data_groups(config: RunConfig, world: DataParallelWorld) -> DataGroups:
    """Collective over all ranks."""
    inner = config.zero.zero_hpz_partition_size
    halves = world.split_data(inner) if inner > 1 else (None, None)
    groups = DataGroups(world.data, world.expert or world.data, world.model, world.model, solo("embd"), *halves)
    return groups.sharing_memory() if config.zero.stage == 3 and world.device.type == "cpu" else groups


def _make_optimizer(model: nn.Module, config: RunConfig, world: DataParallelWorld, groups: DataGroups,
                    layers: list[ModuleLayer], draw: DrawByName | None) -> ZeroOptimizer:
    o, zero = config.optimizer, config.zero
    parameters = list(model.parameters())
    unread = frozenset((0, i) for i, layer in enumerate(layers) if not layer.read_in_backward)
    return ZeroOptimizer(
        parameters, uses={}, groups=groups, policy=policy_of(zero.stage, zero.zero_hpz_partition_size),
        make_optimizer=partial(OPTIMIZERS[o.optimizer], settings=o), scaler=make_scaler(o), clip_grad=o.clip_grad,
        bucket_elements=bucket_elements(zero, sum(p.numel() for p in parameters)),
        overlap=zero.overlap_comm is not False, grad_dtype=DTYPES[o.gradient_dtype], device=world.device,
        sent_dtype=DTYPES.get(zero.sent_dtype), sent_divisor=zero.sent_divisor,
        layer_plan=LayerPlan({0: [layer.parameters for layer in layers]} if layers else {}, unread, 0,
                             zero.param_persistence_threshold),
        offload=make_offload(zero, world.device),
        draw=draw and (lambda spec, start, out: draw(spec.name, start, out)))
