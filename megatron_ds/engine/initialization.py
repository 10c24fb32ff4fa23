"""`initialize`: from a module and DeepSpeed's JSON to an `Engine`, with DeepSpeed's arguments in DeepSpeed's order."""

import logging
import os
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from ..config import RunConfig
from ..config.dump import report_without_effect
from ..errors import ConfigError
from ..mpu.agree import on_all_ranks
from ..mpu.external_groups import DataParallelWorld, has_process_group, join_world
from ..mpu.group import solo
from ..mpu.param_spec import EXPERT_DATA_AXES
from ..planning.run_model import DTYPES, bucket_elements
from ..training.offloading import make_offload
from ..zero.optimizer import DataGroups, LayerPlan, ZeroOptimizer
from ..zero.scaler import make_scaler
from ..zero.settings import policy_of
from .arguments import config_of, take_local_rank
from .auto_values import Sources, fill_autos
from .client_optimizer import ClientOptimizer, checked_groups, client_optimizers
from .engine import Engine, show
from .engine_loader import EngineLoader
from .engine_optimizer import EngineOptimizer, InnerOptimizers, json_optimizers
from .json_settings import block_of, read_settings
from .module_gathering import ModuleGathering
from .module_layers import ModuleLayer, find_layers
from .module_specs import write_specs
from .module_values import Decays, DrawByName, agree, prepare
from .monitor import Monitor
from .parameter_groups import freeze_others, make_groups
from .schedule import SchedulerMaker, make_scheduler
from .zero_init import move_into, partitions_of, zeros

logger = logging.getLogger(__name__)


class Initialized(NamedTuple):
    """What `initialize` returns, to be unpacked: `engine, optimizer, loader, scheduler = initialize(…)`.

    optimizer, training_dataloader and lr_scheduler are None where nothing asked for them.
    """

    engine: Engine
    optimizer: EngineOptimizer | None
    training_dataloader: EngineLoader | None
    lr_scheduler: Any | None

    def __call__(self, *args, **kwargs):
        raise TypeError(f"this is the tuple that initialize returned, not the engine. {UNPACK}")

    def __getattr__(self, name: str):
        raise AttributeError(f"the tuple that initialize returned has no attribute {name!r}. {UNPACK}")


UNPACK = "Unpack it: engine, optimizer, training_dataloader, lr_scheduler = initialize(…), or engine, *_ = initialize(…)."


def initialize(args: Any = None, model: nn.Module | None = None, optimizer: ClientOptimizer | None = None,
               model_parameters: Any = None, training_data: Any = None, lr_scheduler: Any | SchedulerMaker | None = None,
               distributed_port: int | None = None, mpu: Any = None, dist_init_required: bool | None = None,
               collate_fn: Callable[[list], Any] | None = None,
               config: Mapping[str, Any] | str | os.PathLike | None = None, mesh_param: tuple[int, int] | None = None,
               config_params: Mapping[str, Any] | str | os.PathLike | None = None, *,
               decay: Decays | None = None, draw: DrawByName | None = None) -> Initialized:
    """(engine, optimizer, training_dataloader, lr_scheduler): an engine that trains `model`. Collective over all ranks.

    args              a program's arguments: `deepspeed_config` and `local_rank` are read (see `add_config_arguments`)
    model             any torch module
    optimizer         a torch optimizer over the module's parameters, or a function from parameters to one; instead of the
                      config's
    model_parameters  what the config's optimizer trains: parameters, or groups of them as torch has them; None: all
    training_data     a dataset: a loader of this rank's micro-batches is made of it
    lr_scheduler      one of torch's, or a function from the optimizer to one; `engine.step` steps it after each update
    distributed_port  where rank 0 listens, unless the launcher has set MASTER_PORT; None: the launcher's port, else 29500
    mpu               None: all ranks are data-parallel. Else an object with DeepSpeed's six functions, or a Mesh
    dist_init_required  True, None: the process group is made where there is none. False: it is an error if there is none
    collate_fn        of the loader
    config            DeepSpeed's JSON, as a dict, the path of a file or its text; docs/flags.md lists the keys. Or
                      `args.deepspeed_config`, or `config_params`, its former name
    mesh_param        refused: (data-parallel, sequence-parallel) sizes
    decay             decay(name, parameter): whether weight decay applies to it. None: to all, as in DeepSpeed;
                      `lambda name, p: p.dim() > 1` leaves out biases and norms, as Megatron does
    draw              draw(name, start, out) fills `out` with elements of a parameter or buffer that is on the meta device: for
                      a module that is larger than a rank. At stage 3 each rank asks for its own part only

    Takes over the module: its parameters become views of the optimizer's buffers, in the format of the config, with the values
    that data-parallel rank 0 has. Raises ConfigError with everything that is wrong with the config.
    """
    config = config_of(args, config, config_params)
    _check_arguments(model, optimizer, decay, mesh_param)
    take_local_rank(args)
    world = _join(mpu, distributed_port, dist_init_required)

    def prepared():
        client = _client_of(model, optimizer, model_parameters)
        name, found = block_of(config)
        samples = len(training_data) if hasattr(training_data, "__len__") else None
        block = fill_autos(found, Sources(args, model, world.data.size, samples))
        settings = read_settings(block, world.data.size, _learning_rate_of(client), name)
        partitions = partitions_of(model)
        prepare(model, DTYPES[settings.optimizer.params_dtype], world.device, draw or (zeros if partitions else None))
        inner = _inner_optimizers(model, settings, block, client, model_parameters, decay)
        freeze_others(model, inner.groups)
        write_specs(model, world)
        return client, block, settings, partitions, inner

    # Together: a file of settings may be missing on one machine, and the other ranks would wait in `agree`.
    client, block, settings, partitions, inner = on_all_ranks(world.world, prepared)
    agree(model, world)
    layers = find_layers(model) if settings.zero.stage == 3 else []
    groups = _data_groups(settings, world)
    # Together: a rank's disk may be full, or its file of weights missing.
    zero = on_all_ranks(world.world, lambda: _make_zero(model, settings, world, groups, layers, inner, draw or zeros))
    move_into(zero, partitions)
    gathering = zero.gathering_of(0) if layers else None
    hooks = ModuleGathering(model, layers, gathering, settings.zero.prefetch_bucket_size) if gathering else None
    defaults = client.defaults if client else {k: v for group in inner.groups[:1] for k, v in group.items() if k != "params"}
    # Together: its folder may be one that rank 0 cannot write.
    monitor = on_all_ranks(world.world, lambda: Monitor(settings.logging.tensorboard_dir if world.rank == 0 else None))
    engine = Engine(model, block, settings, world, EngineOptimizer(zero, inner, defaults), hooks, monitor)
    for p in model.parameters():
        p.engine = weakref.ref(engine)          # for zero.GatheredParameters
    if world.rank == 0 and (accepted := report_without_effect(settings)):
        show(accepted)
    engine.lr_scheduler = make_scheduler(settings, engine.optimizer, lr_scheduler)
    if training_data is not None:
        engine.training_dataloader = engine.deepspeed_io(training_data, collate_fn=collate_fn)
    return Initialized(engine, engine.optimizer if inner.groups else None, engine.training_dataloader, engine.lr_scheduler)


def _check_arguments(model: Any, optimizer: Any, decay: Any, mesh_param: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model is {type(model).__name__}, not a torch module: an engine needs its parameters.")
    if optimizer is not None and decay is not None:
        raise ConfigError("decay= chooses the parameters with weight decay for the config's optimizer, and optimizer= has its "
                          "own parameter groups. Give one of them.")
    if mesh_param is not None and tuple(mesh_param)[1:] != (1,):
        raise ConfigError(f"mesh_param={mesh_param}: an engine does not split sequences over ranks. Leave it out; all ranks "
                          "are then data-parallel.")


def _join(mpu: Any, port: int | None, required: bool | None) -> DataParallelWorld:
    """Collective over all ranks."""
    if required is False and mpu is None and not has_process_group():
        raise ConfigError("dist_init_required=False, but there is no process group yet. Make it before initialize, with "
                          "torch.distributed.init_process_group, or leave the argument out.")
    if port is not None and mpu is None:
        os.environ.setdefault("MASTER_PORT", str(port))
    return join_world(mpu)


def _client_of(model: nn.Module, optimizer: Any, model_parameters: Any) -> torch.optim.Optimizer | None:
    if optimizer is None:
        return None
    if not isinstance(optimizer, torch.optim.Optimizer):
        if not callable(optimizer):
            raise ConfigError(f"optimizer is {type(optimizer).__name__}: give a torch optimizer, or a function that makes one "
                              "from parameters.")
        optimizer = optimizer(list(model.parameters() if model_parameters is None else model_parameters))
    checked_groups(optimizer, model)
    return optimizer


def _learning_rate_of(client: torch.optim.Optimizer | None) -> float | None:
    return None if client is None else float(client.param_groups[0].get("lr") or 0.0)


def _inner_optimizers(model: nn.Module, settings: RunConfig, block: Mapping[str, Any], client: torch.optim.Optimizer | None,
                      model_parameters: Any, decay: Decays | None) -> InnerOptimizers:
    """The client's optimizer, else the config's, else one of nothing."""
    if client is not None:
        if "optimizer" in block:
            logger.warning('"optimizer" in the config has no effect: initialize was given optimizer=, which comes first')
        return client_optimizers(client, offloaded=settings.zero.offload_optimizer != "none")
    groups = make_groups(model, model_parameters, decay) if "optimizer" in block else []
    return json_optimizers(settings, groups)


def _data_groups(config: RunConfig, world: DataParallelWorld) -> DataGroups:
    """Collective over all ranks."""
    inner = config.zero.zero_hpz_partition_size
    halves = world.split_data(inner) if inner > 1 else (None, None)
    groups = DataGroups(world.data, world.by_axes[EXPERT_DATA_AXES], world.model, world.model, solo("embd"), *halves)
    return groups.sharing_memory() if config.zero.stage == 3 and world.device.type == "cpu" else groups


def _make_zero(model: nn.Module, config: RunConfig, world: DataParallelWorld, groups: DataGroups,
               layers: list[ModuleLayer], inner: InnerOptimizers, draw: DrawByName | None) -> ZeroOptimizer:
    o, zero = config.optimizer, config.zero
    parameters = list(model.parameters())
    unread = frozenset((0, i) for i, layer in enumerate(layers) if not layer.read_in_backward)
    return ZeroOptimizer(
        parameters, uses={}, groups=groups, policy=policy_of(zero.stage, zero.zero_hpz_partition_size),
        make_optimizer=inner, scaler=make_scaler(o), clip_grad=o.clip_grad,
        bucket_elements=bucket_elements(zero, sum(p.numel() for p in parameters)),
        overlap=zero.overlap_comm is not False, grad_dtype=DTYPES[o.gradient_dtype], device=world.device,
        sent_dtype=DTYPES.get(zero.sent_dtype), sent_divisor=zero.sent_divisor,
        layer_plan=LayerPlan({0: [layer.parameters for layer in layers]} if layers else {}, unread, 0,
                             zero.param_persistence_threshold),
        offload=make_offload(zero, world.device),
        draw=draw and (lambda spec, start, out: draw(spec.name, start, out)))
