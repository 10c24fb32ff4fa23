"""From a config to running objects: the only file that sees the whole `RunConfig` and every room at once.

Pure decisions are in `plan.py` (how layers are cut, which program each pipeline rank runs); here are the objects
(`build_engine`). Layers receive numbers and groups, never the config's root.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from ..config import RunConfig
from ..models import MODELS, Placement, build_stages, count_uses, with_random_ltd
from ..mpu.channels import Channels
from ..mpu.mesh import Mesh
from ..pipeline.executor import Executor
from ..pipeline.instruction import Op
from ..pipeline.stage import Stage
from ..tensor_parallel.init import initialize, initialize_interval
from ..token_drop import make_token_drop
from ..zero.data_groups import DATA, EXPERT_DATA, DataGroups
from ..zero.optimizer import ZeroOptimizer
from ..zero.set_plan import ParameterUse
from ..zero.settings import ZeroSettings
from .dtypes import DTYPES
from .layer_timing import measured_times
from .pinning import agree_on_pinning, is_automatic, memory_of_rank, pinning_text
from .plan import RunPlan, microbatches_of, moments_of, plan_run, plan_schedule
from .together import together


def describe_layers(config: RunConfig, mesh: Mesh) -> list:
    """The model as a list of named layers, none of them built yet.

    With parameters in shards the layers are built without memory (on the meta device): no rank ever holds the whole.
    """
    dtype = DTYPES[config.optimizer.params_dtype]
    device = torch.device("meta") if config.zero.stage == 3 else mesh.device
    tp, split, train = mesh.group("tp"), config.parallel.sequence_parallel, config.train
    layers = MODELS[config.model.model](
        config.model, tp=tp, sequence_parallel=split, dtype=dtype, device=device, seed=train.seed,
        recompute_granularity=train.recompute_granularity, recompute_num_layers=train.recompute_num_layers)
    drop = make_token_drop(config)
    return with_random_ltd(layers, drop.blocks, Placement(tp, split, dtype, device, train.seed)) if drop else layers


@dataclass
class Engine:
    """The running objects of one rank.

    stages    of this rank, by global number
    modules   of all of them, in the model's order
    pinned, why_pinned  ZeRO 3 gathers a stage once a step; and what decided about it, where the config does not say
    """

    config: RunConfig
    mesh: Mesh
    plan: RunPlan
    stages: dict[int, Stage]
    modules: nn.ModuleList
    parameters: list[nn.Parameter]
    optimizer: ZeroOptimizer
    executor: Executor
    pinned: bool
    why_pinned: str

    @property
    def layers(self) -> dict[str, tuple[int, nn.Module]]:
        """{global name: (stage, module)} of this rank's layers."""
        return {name: (index, module) for index, stage in self.stages.items()
                for name, module in zip(self.plan.stage_names(index), stage.modules, strict=True)}

    def traffic(self) -> Counter:
        """Payload bytes of a step of the full batch by (operation, group's axes), over the data-parallel ranks, as planned."""
        m, zero = microbatches_of(self.config), self.config.zero
        program = plan_schedule(self.config, m, self.pinned, self.plan.stage_costs())[self.mesh.coordinate("pp")]
        return self.optimizer.traffic(m, zero.stage >= 2 and zero.zero_accumulate == "sharded", self.pinned,
                                      moments_of(program))


def build_engine(config: RunConfig, mesh: Mesh) -> Engine:
    """Build this rank's stages and optimizer. Collective: the optimizer may gather its first parameters."""
    memory = memory_of_rank(mesh) if is_automatic(config) else 0
    layers = describe_layers(config, mesh)
    plan = plan_run(config, layers, measured_times(config, mesh))
    mesh.place_stages(plan.shape.placement)
    slices = {stage: layers[plan.slice_of(stage)] for stage in plan.shape.stages_of(mesh.coordinate("pp"))}
    built = build_stages(slices)
    modules = nn.ModuleList(module for stage in built.values() for module in stage)
    parameters = list(modules.parameters())
    if not parameters or not parameters[0].is_meta:
        initialize(parameters, config.train.seed, mesh.group("tp").rank, mesh.size("tp"))
    groups = _data_groups(config, mesh)
    # Together: a rank's disk may be full.
    optimizer = together(mesh.group("world"), lambda: _build_optimizer(config, mesh, groups, built, parameters))
    kinds = {stage: [layer.sort for layer in layers] for stage, layers in slices.items()}
    pinned, why_pinned = _pinning(config, mesh, memory, optimizer, kinds, plan)
    stages = {index: _build_stage(config, mesh, index, list(built[index]), optimizer, plan) for index in built}
    return Engine(config, mesh, plan, stages, modules, parameters, optimizer,
                  _build_executor(config, mesh, stages, optimizer, plan, pinned), pinned, why_pinned)


def _build_stage(config: RunConfig, mesh: Mesh, index: int, modules: list[nn.Module], optimizer: ZeroOptimizer,
                 plan: RunPlan) -> Stage:
    gathering, is_last = optimizer.gathering_of(index), index == plan.shape.num_stages - 1
    return Stage(index, modules, is_first=index == 0, is_last=is_last,
                 loss=loss_function(config, mesh.group("tp")) if is_last else None,
                 enter=gathering and gathering.enter, leave=gathering and gathering.leave,
                 complete=gathering and gathering.close)


def _pinning(config: RunConfig, mesh: Mesh, memory: int, optimizer: ZeroOptimizer, kinds: Mapping[int, list[str]],
             plan: RunPlan) -> tuple[bool, str]:
    """(whether stages are pinned, why). Collective over the world where that is for us to decide."""
    if not is_automatic(config):
        return config.zero.stage == 3 and config.zero.zero3_pin_stage == "on", ""
    program = plan_schedule(config, microbatches_of(config), costs=plan.stage_costs())[mesh.coordinate("pp")]
    decision = agree_on_pinning(config, mesh, memory, optimizer, kinds, program)
    return decision.pinned, pinning_text(decision)


def _data_groups(config: RunConfig, mesh: Mesh) -> DataGroups:
    """Collective over the world."""
    inner = config.zero.zero_hpz_partition_size
    halves = mesh.split_data(inner) if inner > 1 else (None, None)
    groups = DataGroups({DATA: mesh.group("dp", "cp"), EXPERT_DATA: mesh.group("edp")}, mesh.group("tp"),
                        mesh.group("tp", "pp"), mesh.group("embd"), *halves)
    return groups.sharing_memory() if config.zero.stage == 3 and mesh.device.type == "cpu" else groups


def _build_optimizer(config: RunConfig, mesh: Mesh, groups: DataGroups, stages: Mapping[int, nn.ModuleList],
                     parameters: list[nn.Parameter]) -> ZeroOptimizer:
    counts = {p: count for modules in stages.values() for p, count in count_uses(modules).items()}
    tp, seed = groups.tp, config.train.seed
    return ZeroOptimizer(
        parameters, ZeroSettings.from_config(config), groups, ParameterUse.of_stages(stages, counts), mesh.device,
        draw=lambda spec, start, out: initialize_interval(out, spec, start, seed, tp.rank, tp.size))


def _build_executor(config: RunConfig, mesh: Mesh, stages: dict[int, Stage], optimizer: ZeroOptimizer, plan: RunPlan,
                    pinned: bool) -> Executor:
    split = mesh.size("tp") if config.parallel.sequence_parallel else 1
    pp_rank, costs = mesh.coordinate("pp"), plan.stage_costs()
    return Executor(
        lambda num_microbatches: plan_schedule(config, num_microbatches, pinned, costs)[pp_rank],
        stages, Channels(mesh.group("pp")), stage_rank=plan.shape.placement.__getitem__,
        activation_shape=lambda batch: (batch.seq_length // split, batch.size, config.model.hidden_size),
        dtype=DTYPES[config.optimizer.params_dtype], device=mesh.device,
        hooks={Op.REDUCE: optimizer.arm, Op.TIE: optimizer.reduce_tied,
               Op.GATHER: optimizer.keep_gathered, Op.RELEASE: optimizer.release_gathered})


def loss_function(config: RunConfig, tp) -> Callable:
    return partial(MODELS[config.model.model].loss, tp=tp, vocab_size=config.model.vocab_size,
                   label_smoothing=config.train.label_smoothing, per_token=config.train.calculate_per_token_loss)


def objective_terms(config: RunConfig) -> tuple[str, ...]:
    """Names of what the model's objective holds beside the tokens' loss."""
    return MODELS[config.model.model].terms(config.model)
