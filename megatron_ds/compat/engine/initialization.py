"""`initialize`: from a module and DeepSpeed's JSON to an `Engine`, with DeepSpeed's arguments."""

import logging
import os
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from ...config import RunConfig
from ...config.sources.reading import SourceReading
from ...config.sources.without_effect import report_without_effect
from ...errors import ArgumentError, ConfigError
from ...launch_env import local_rank_contradiction, with_local_rank
from ...mpu.agree import on_all_ranks
from ...mpu.group import solo
from ...mpu.managed_parameter import ManagedParameter, accumulator_of
from ...mpu.stuck_ranks import doing
from ...planning.run_model import DTYPES
from ...zero.data_groups import DataGroups
from ...zero.optimizer import ZeroOptimizer
from ...zero.set_plan import ParameterUse
from ...zero.settings import ZeroSettings
from ...zero.unused import Rule
from ..config.targets import autocast_of
from ..deepspeed.external_groups import DataParallelWorld, has_process_group, join_world
from .auto_tensor_parallel import (
    TensorParallelWish,
    divide,
    require_format,
    wish_of,
)
from .autocast import run_in_autocast
from .client_optimizer import ClientOptimizer, client_optimizers
from .communication import record_communication
from .curriculum_length import BLOCK as CURRICULUM
from .curriculum_length import curriculum_length
from .curriculum_loader import CurriculumLoader
from .data_efficiency import BLOCK as DATA_EFFICIENCY
from .data_efficiency import (
    DataEfficiency,
    data_efficiency_of,
    require_same_data_efficiency,
)
from .engine import Engine, show
from .expert_layers import connect_layers, connect_routers, with_expert_ranks
from .gradients import EngineParameter
from .json_settings import (
    Sources,
    block_of,
    config_of,
    fill_autos,
    read_settings,
    unused_rule,
)
from .leaf_modules import mark_leaves_of
from .loader import EngineLoader
from .log_level import log_level_of, set_log_level
from .module_gathering import ModuleGathering
from .module_specs import ModuleLayer, find_layers, write_specs
from .module_values import DrawByName, agree, prepare
from .monitor import Monitor
from .number_formats import BLOCK, formats_of
from .optimizer import (
    Decays,
    EngineOptimizer,
    InnerOptimizers,
    SchedulerMaker,
    check_owned,
    freeze_others,
    make_groups,
    make_scheduler,
)
from .parameter_offload import ParameterOffload
from .pipeline import PipelineEngine
from .pipeline_module import PipelineModule
from .same_settings import require_same_groups, require_same_settings
from .several_optimizers import SeveralOptimizers, json_optimizers
from .tensor_parallel_keys import with_sizes_of_data
from .zero_init import Partition, check_values, move_into, partitions_of, zeros

logger = logging.getLogger(__name__)


class Initialized(NamedTuple):
    """What `initialize` returns, to be unpacked. None: neither the config nor an argument gives it."""

    engine: Engine
    optimizer: EngineOptimizer | None
    training_dataloader: EngineLoader | CurriculumLoader | None
    lr_scheduler: Any | None

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError(
            f"this is the tuple that initialize returned, not the engine. {UNPACK}"
        )

    def __getattr__(self, name: str) -> None:
        raise AttributeError(
            f"the tuple that initialize returned has no attribute {name!r}. {UNPACK}"
        )


UNPACK = (
    "Unpack it: engine, optimizer, training_dataloader, lr_scheduler = initialize(…), or "
    "engine, *_ = initialize(…)."
)


@doing("initialize")
def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: ClientOptimizer | None = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any | SchedulerMaker | None = None,
    distributed_port: int | None = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list], Any] | None = None,
    config: Mapping[str, Any] | str | os.PathLike | None = None,
    mesh_param: tuple[int, int] | None = None,
    config_params: Mapping[str, Any] | str | os.PathLike | None = None,
    *,
    decay: Decays | None = None,
    draw: DrawByName | None = None,
) -> Initialized:
    """(engine, optimizer, training_dataloader, lr_scheduler): an engine that trains `model`. Collective.

    args              a program's: `deepspeed_config` and `local_rank` are read (see `add_config_arguments`)
    model             any torch module
    optimizer         a torch optimizer over the module's parameters, or a function from parameters to one;
                      takes the place of the config's
    model_parameters  what the config's optimizer trains: parameters, or groups of them as in torch; None: all
    training_data     a dataset, from which a loader of this rank's micro-batches is made
    lr_scheduler      one of torch's, or a function from the optimizer to one, for `engine.step` to step
    distributed_port  where rank 0 listens, unless the launcher has set MASTER_PORT; None: 29500
    mpu               None: all ranks are data-parallel. Else DeepSpeed's six functions, or a Mesh
    dist_init_required  False: there must be a process group already; else it is made where there is none
    collate_fn        of the loader
    config            DeepSpeed's JSON, as a dict, the path of a file or its text;
                      docs/reference/flags.md lists the keys. Or `args.deepspeed_config`, or
                      `config_params`, its former name
    mesh_param        refused: (data-parallel, sequence-parallel) sizes
    decay             decay(name, parameter): whether weight decay applies to it. None: to all, as in
                      DeepSpeed; `lambda name, p: p.dim() > 1` leaves out biases and norms, as Megatron does
    draw              draw(name, start, out) fills `out` with elements of a parameter or buffer on the meta
                      device, of a module larger than a rank. At stage 3 each rank draws its own part only

    Takes over the module: its parameters become views of the optimizer's buffers, in the format of the
    config, with the values of data-parallel rank 0. Raises one ConfigError with all problems of the config.
    """
    # Arguments and process groups.
    config = config_of(args, config, config_params)
    module = _checked_module(model)
    _check_arguments(optimizer, decay, mesh_param)
    _take_local_rank(args)
    wish = wish_of(config, module)
    joined = _join(mpu, distributed_port, dist_init_required, wish.size)
    world = with_expert_ranks(module, joined)
    _end_earlier_engines(module, world)
    divide(module, wish, world)
    # Settings, values and specs. Together: where a rank lacks the file of settings, the others would wait in
    # `agree`.
    trained = _Trained(optimizer, model_parameters, decay, wish)
    ready = on_all_ranks(
        world.world,
        lambda: _prepare(
            config,
            Sources(args, module, world.data.size, _samples(training_data)),
            world,
            trained,
            draw,
        ),
    )
    require_same_settings(ready.settings, world)
    require_same_data_efficiency(ready.data_efficiency, world)
    set_log_level(log_level_of("config", ready.block))
    agree(module, world)
    require_same_groups(ready.inner.groups, world)
    # The engine, then what a program may leave out: scheduler and loader.
    engine = _build_engine(module, world, ready, draw or zeros)
    if world.rank == 0 and (accepted := report_without_effect(ready.settings)):
        show(accepted)
    engine.lr_scheduler = make_scheduler(ready.settings, engine.optimizer, lr_scheduler)
    if training_data is not None:
        engine.training_dataloader = engine.deepspeed_io(
            training_data, collate_fn=collate_fn
        )
    return Initialized(
        engine,
        engine.optimizer if ready.inner.groups else None,
        engine.training_dataloader,
        engine.lr_scheduler,
    )


class _Trained(NamedTuple):
    """The arguments of `initialize` about the optimizer, its parameters and their division."""

    optimizer: ClientOptimizer | None
    parameters: Any
    decay: Decays | None
    wish: TensorParallelWish


class _Prepared(NamedTuple):
    """What each rank derives from the arguments of `initialize`, before ranks compare their modules."""

    client: torch.optim.Optimizer | None
    block: Mapping[str, Any]  # the JSON, "auto" values filled
    settings: RunConfig
    partitions: Mapping[nn.Parameter, Partition]  # of parameters made under `zero.Init`
    inner: InnerOptimizers | SeveralOptimizers
    data_efficiency: DataEfficiency


def _prepare(
    config: Mapping[str, Any] | str | os.PathLike,
    sources: Sources,
    world: DataParallelWorld,
    trained: _Trained,
    draw: DrawByName | None,
) -> _Prepared:
    """Read the settings; give the module its dtype, device, values and specs. Not collective."""
    model = sources.model
    client = _client_of(model, trained)
    # The settings, with the values that the sources give.
    name, found = block_of(config)
    formats, rest = formats_of(name, found)
    sized = fill_autos(rest, sources)
    block = with_sizes_of_data(sized, trained.wish.size, world.data.size)
    lr = None if client is None else float(client.param_groups[0].get("lr") or 0.0)
    is_passed = curriculum_length(name, block, model).difficulty is not None
    efficiency = data_efficiency_of(name, block)
    own = {DATA_EFFICIENCY, CURRICULUM} if is_passed else {DATA_EFFICIENCY}
    read = {key: block[key] for key in block if key not in own}
    settings = read_settings(read, world.data.size, lr, name)
    require_format(trained.wish, DTYPES[settings.optimizer.params_dtype])
    # The values of the module: drawn by name, or zeros where ZeRO will fill them.
    partitions = partitions_of(model)
    if partitions and draw is None:
        check_values(model, partitions)
    values = draw or (zeros if partitions else None)
    prepare(
        model, DTYPES[settings.optimizer.params_dtype], world.device, values, formats
    )
    if dtype := autocast_of(SourceReading(), name, block):
        run_in_autocast(model, getattr(torch, dtype), world.device)
    # Its optimizers, and what they train.
    inner = _inner_optimizers(model, settings, block, client, trained)
    freeze_others(model, inner.groups)
    write_specs(model, world)
    block |= {key: found[key] for key in (BLOCK,) if key in found}
    if settings.zero.stage == 3:
        mark_leaves_of(block, model)
    return _Prepared(client, block, settings, partitions, inner, efficiency)


def _end_earlier_engines(model: nn.Module, world: DataParallelWorld) -> None:
    """Destroy the engines that the module belongs to. Collective over all ranks."""
    for engine in on_all_ranks(world.world, lambda: _engines_of(model)):
        if world.rank == 0:
            logger.warning(
                "initialize: the module belongs to an engine, which is destroyed and trains no more; the "
                "new one starts from the present weights, without the state of the optimizer"
            )
        engine.destroy()


def _engines_of(model: nn.Module) -> list[Engine]:
    """Return the engines of the module's parameters. Raises ConfigError where one is gone without `destroy`."""
    found = {}
    for name, p in model.named_parameters():
        engine = p.engine() if hasattr(p, "engine") else None
        if engine is None and accumulator_of(p) is not None:
            raise ConfigError(
                f"the module belongs to an engine that is gone ({name}): its hooks are still in the module. "
                "Call engine.destroy() before the last reference to an engine goes, or make a new module."
            )
        if engine is not None:
            found[id(engine)] = engine
    return list(found.values())


def _samples(training_data: Any) -> int | None:
    """Return the number of training samples; None for data without a length."""
    return len(training_data) if hasattr(training_data, "__len__") else None


def _build_engine(
    model: nn.Module, world: DataParallelWorld, ready: _Prepared, draw: DrawByName
) -> Engine:
    """Collective over all ranks: a step that fails on one (a full disk, a missing file) fails on all."""
    settings = ready.settings
    inner = ready.inner
    # The module's values move into the shards of ZeRO.
    layers = find_layers(model) if settings.zero.stage == 3 else []
    groups = _data_groups(settings, world)
    rule = unused_rule("config", ready.block)
    make = lambda: on_all_ranks(
        world.world,
        lambda: _make_zero(model, settings, world, groups, layers, inner, draw, rule),
    )
    zero = make()
    move_into(zero, ready.partitions)
    # Stage 3: hooks gather each layer when it is used.
    gathering = zero.gathering_of(0) if layers else None
    prefetch = settings.zero.prefetch_bucket_size
    hooks = ModuleGathering(model, layers, gathering, prefetch) if gathering else None
    # The optimizer and the curves, under DeepSpeed's names.
    first = ready.client.defaults if ready.client else next(iter(inner.groups), {})
    defaults = {key: value for key, value in first.items() if key != "params"}
    optimizer = EngineOptimizer(zero, inner, defaults, make)
    if settings.zero.stage == 3:
        optimizer.parameter_offload = ParameterOffload(model)
    monitor = on_all_ranks(
        world.world, lambda: Monitor(settings if world.rank == 0 else None)
    )
    kind = PipelineEngine if isinstance(model, PipelineModule) else Engine
    engine = kind(model, ready.block, settings, world, optimizer, hooks, monitor)
    connect_layers(engine)
    connect_routers(engine)
    record_communication(settings, world)
    for p in model.parameters():
        vars(p)["engine"] = weakref.ref(engine)  # for zero.GatheredParameters
        if type(p) in (nn.Parameter, ManagedParameter) and (p.requires_grad or layers):
            p.__class__ = EngineParameter
    return engine


def _checked_module(model: Any) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise ArgumentError(
            f"model is {type(model).__name__}, not a torch module: an engine needs its "
            "parameters."
        )
    return model


def _check_arguments(optimizer: Any, decay: Any, mesh_param: Any) -> None:
    if optimizer is not None and decay is not None:
        raise ConfigError(
            "decay= chooses the parameters with weight decay for the config's optimizer, but "
            "optimizer= has its own parameter groups. Give one of them."
        )
    if mesh_param is not None and tuple(mesh_param)[1:] != (1,):
        raise ConfigError(
            f"mesh_param={mesh_param}: an engine does not split sequences over ranks. Leave it "
            "out; all ranks are then data-parallel."
        )


def _take_local_rank(args: Any) -> None:
    """Set LOCAL_RANK from `args.local_rank`, where a launcher has not. Raises ConfigError if both differ."""
    rank = getattr(args, "local_rank", None)
    if problem := local_rank_contradiction(os.environ, rank):
        raise ConfigError(problem)
    os.environ.update(with_local_rank(os.environ, rank))


def _join(
    mpu: Any, port: int | None, required: bool | None, tensor_parallel: int
) -> DataParallelWorld:
    """Return the groups of `mpu`, made where there are none. Collective over all ranks."""
    if required is False and mpu is None and not has_process_group():
        raise ConfigError(
            "dist_init_required=False, but there is no process group yet. Create it before "
            "initialize, with torch.distributed.init_process_group, or leave the argument out."
        )
    if port is not None and mpu is None:
        os.environ.setdefault("MASTER_PORT", str(port))
    return join_world(mpu, tensor_parallel)


def _client_of(model: nn.Module, trained: _Trained) -> torch.optim.Optimizer | None:
    """Return the program's optimizer, made where it is a function. None: the config's is used."""
    optimizer = trained.optimizer
    parameters = trained.parameters
    if optimizer is None:
        return None
    if not isinstance(optimizer, torch.optim.Optimizer):
        if not callable(optimizer):
            raise ConfigError(
                f"optimizer is {type(optimizer).__name__}: give a torch optimizer, or a "
                "function that makes one from parameters."
            )
        optimizer = optimizer(
            list(model.parameters() if parameters is None else parameters)
        )
    owned = [p for group in optimizer.param_groups for p in group["params"]]
    check_owned(model, owned, "optimizer=")
    return optimizer


def _inner_optimizers(
    model: nn.Module,
    settings: RunConfig,
    block: Mapping[str, Any],
    client: torch.optim.Optimizer | None,
    trained: _Trained,
) -> InnerOptimizers | SeveralOptimizers:
    """Return the client's optimizer, else the config's, else one without parameters."""
    if client is not None:
        if "optimizer" in block:
            logger.warning(
                '"optimizer" in the config has no effect: optimizer= of initialize takes its '
                "place"
            )
        return client_optimizers(
            client, offloaded=settings.zero.offload_optimizer != "none"
        )
    groups = (
        make_groups(model, trained.parameters, trained.decay)
        if "optimizer" in block
        else []
    )
    return json_optimizers(model, settings.optimizer, groups)


def _data_groups(config: RunConfig, world: DataParallelWorld) -> DataGroups:
    """Return the groups that ZeRO reduces and shards over. Collective over all ranks."""
    inner = config.zero.zero_hpz_partition_size
    halves = world.split_data(inner) if inner > 1 else (None, None)
    groups = DataGroups(world.by_axes, world.model, world.model, solo("embd"), *halves)
    if world.device.type == "cuda" and config.zero.stage == 3:
        return groups.gathering_apart(partial(world.connect_apart, purpose="gathers"))
    return groups.sharing_memory() if world.device.type == "cpu" else groups


def _make_zero(
    model: nn.Module,
    config: RunConfig,
    world: DataParallelWorld,
    groups: DataGroups,
    layers: list[ModuleLayer],
    inner: InnerOptimizers | SeveralOptimizers,
    draw: DrawByName | None,
    unused: Rule,
) -> ZeroOptimizer:
    # prefetch=0: `ModuleGathering` starts the gathers of the next layers.
    settings = replace(
        ZeroSettings.from_config(config, inner.param_groups()),
        prefetch=0,
        unused=unused,
    )
    unread = frozenset(
        (0, i) for i, layer in enumerate(layers) if not layer.read_in_backward
    )
    use = ParameterUse(
        {0: [layer.parameters for layer in layers]} if layers else {}, unread
    )
    return ZeroOptimizer(
        list(model.parameters()),
        settings,
        groups,
        use,
        world.device,
        draw=draw and (lambda spec, start, out: draw(spec.name, start, out)),
    )
