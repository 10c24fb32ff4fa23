"""From a configuration to running objects: the one file that uses all of `RunConfig` and every room.

`planning/replica_plan.py` makes the decisions (how layers are cut, what stays gathered); `build_replica` makes
the objects. Layers receive a `ParallelContext` and numbers, never the whole
configuration.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, Protocol

import torch
from torch import nn

from ..config import RunConfig
from ..config.rules.group import GroupRule, group_rules
from ..models import build_stages, count_uses
from ..moe.balance import StepState
from ..mpu.agree import on_all_ranks
from ..mpu.context import SequenceSlice
from ..mpu.managed_parameter import describe, spec_of
from ..mpu.mesh import Mesh
from ..mpu.param_spec import DATA_AXES, EXPERT_DATA_AXES
from ..mpu.pipeline_channels import channels_over
from ..pipeline.executor import Executor
from ..pipeline.instruction import Op, Schedule
from ..pipeline.passes import forward_only
from ..pipeline.stage import LayerHooks, Stage
from ..planning.flops import peak_flops
from ..planning.replica_plan import ReplicaPlan, plan_replica
from ..planning.run_model import (
    DTYPES,
    loss_function,
    parallel_context,
)
from ..planning.run_plan import (
    RunPlan,
    microbatches_of,
    moments_of,
    plan_schedule,
)
from ..tensor_parallel.init import initialize, initialize_interval
from ..zero.data_groups import DataGroups
from ..zero.optimizer import ZeroOptimizer
from ..zero.set_plan import ParameterUse
from ..zero.settings import ZeroSettings
from .batches import Batches, make_batches
from .save_under_way import SaveUnderWay
from .step_metrics import StepMetrics


class KeptState(Protocol):
    """State of an observer: plain values in run.json."""

    def state(self) -> Mapping[str, Any]:
        """Return the values."""

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned; {} if the checkpoint has none: begin anew."""


@dataclass
class Replica:
    """The running objects of one rank.

    stages         the pipeline stages of this rank, by global number
    modules        the layers of all these stages, in the order of the model
    keeps_gathered ZeRO 3 gathers the weights of a stage once a step
    why_gathered   the reason of `keeps_gathered`; "" if the configuration states it
    metrics        of training steps, over all ranks
    step_state     what layers remember from step to step, beside parameters
    states         what observers keep from step to step: name in run.json → object
    frozen         names of the weights below `AddedWeights`, which are not saved; none without such weights
    saving         the checkpoint of this state that is written in the background; None without --async-save
    """

    config: RunConfig
    mesh: Mesh
    plan: RunPlan
    batches: Batches
    stages: dict[int, Stage]
    modules: nn.ModuleList
    parameters: list[nn.Parameter]
    optimizer: ZeroOptimizer
    executor: Executor
    keeps_gathered: bool
    why_gathered: str
    metrics: StepMetrics
    step_state: StepState
    frozen: frozenset[str] = frozenset()
    saving: SaveUnderWay | None = None
    states: dict[str, KeptState] = field(default_factory=dict)

    @property
    def seeks_loss_scale(self) -> bool:
        """Whether an overflow is part of finding the loss scale: the optimizer skips the step."""
        scale = self.config.optimizer.loss_scale
        return self.optimizer.loss_scale != 1.0 and scale is None

    @property
    def peak_flops(self) -> float | None:
        """FLOP/s of the device in the dtype of the parameters, if known."""
        dtype = self.parameters[0].dtype if self.parameters else torch.float32
        return peak_flops(self.mesh.device, dtype)

    @property
    def layers(self) -> dict[str, tuple[int, nn.Module]]:
        """{global name: (stage, module)} of this rank's layers."""
        found = {}
        for index, stage in self.stages.items():
            names = self.plan.stage_names(index)
            for name, module in zip(names, stage.modules, strict=True):
                found[name] = index, module
        return found

    def traffic(self) -> Counter:
        """Planned payload bytes of a step over the data-parallel ranks, by (operation, axes)."""
        m = microbatches_of(self.config)
        zero = self.config.zero
        schedule = plan_schedule(
            self.config, m, self.keeps_gathered, self.plan.stage_costs()
        )
        return self.optimizer.traffic(
            m,
            zero.stage >= 2 and zero.zero_accumulate == "sharded",
            self.keeps_gathered,
            moments_of(schedule[self.mesh.coordinate("pp")]),
        )


def build_replica(
    config: RunConfig,
    mesh: Mesh,
    planned: ReplicaPlan | None = None,
    *,
    trains: bool = True,
) -> Replica:
    """Build this rank's stages and optimizer. Collective over the world.

    planned: from `plan_replica`, which is called without it
    trains: False for weights alone, without gradients and state of an optimizer
    """
    planned = planned or plan_replica(config, mesh)
    plan = planned.run
    keeps = planned.keeps_gathered
    ctx = parallel_context(config, mesh)
    mesh.place_stages(plan.shape.placement)
    held = plan.shape.stages_of(mesh.coordinate("pp"))

    # Modules and their initial weights. Those on the meta device are drawn by the optimizer, shard by shard.
    built = build_stages({stage: plan.stage_layers(stage) for stage in held})
    modules = nn.ModuleList(module for stage in built.values() for module in stage)
    parameters = list(modules.parameters())
    _scale_initial_weights(parameters, group_rules(config.optimizer.param_groups))
    if not parameters or not parameters[0].is_meta:
        initialize(parameters, config.train.seed, mesh.coordinates)
    frozen = {spec_of(p).name for p in parameters if not p.requires_grad}
    for parameter in parameters:
        parameter.requires_grad_(parameter.requires_grad and trains)

    # The optimizer takes over the parameters. On all ranks, because one rank's disk may be full.
    groups = _data_groups(config, mesh)
    make = partial(_build_optimizer, config, mesh, groups, built, parameters, trains)
    optimizer = on_all_ranks(mesh.group("world"), make)

    stages = {
        i: _build_stage(config, mesh, i, list(built[i]), optimizer, plan) for i in built
    }
    executor = _build_executor(config, mesh, ctx.slice, stages, optimizer, plan, keeps)
    metrics = StepMetrics(mesh, config.train.calculate_per_token_loss)
    return Replica(
        config,
        mesh,
        plan,
        make_batches(config, mesh, ctx.slice),
        stages,
        modules,
        parameters,
        optimizer,
        executor,
        keeps,
        planned.why_gathered,
        metrics,
        StepState(modules, mesh.reduction, mesh.device),
        frozenset(() if config.added_weights is None else frozen),
    )


def _scale_initial_weights(
    parameters: Iterable[nn.Parameter], rules: Sequence[GroupRule]
) -> None:
    """Multiply the standard deviations in the specs by `init_factor` of --param-group."""
    for p in parameters:
        for rule in rules:
            spec = spec_of(p)
            if rule.matches(spec.name):
                init = replace(spec.init, std=spec.init.std * rule.init_factor)
                describe(p, replace(spec, init=init))


def _build_stage(
    config: RunConfig,
    mesh: Mesh,
    index: int,
    modules: list[nn.Module],
    optimizer: ZeroOptimizer,
    plan: RunPlan,
) -> Stage:
    gathering = optimizer.gathering_of(index)
    is_last = index == plan.shape.num_stages - 1
    hooks = (
        LayerHooks(gathering.enter, gathering.leave, gathering.close)
        if gathering
        else LayerHooks()
    )
    if arrivals := optimizer.arrivals_of(index):
        arrivals.begin()
        hooks = replace(hooks, before=arrivals.wait)
    return Stage(
        index,
        modules,
        is_first=index == 0,
        is_last=is_last,
        loss=loss_function(config, mesh) if is_last else None,
        hooks=hooks,
        per_token=config.train.calculate_per_token_loss,
    )


def _data_groups(config: RunConfig, mesh: Mesh) -> DataGroups:
    """Collective over the world."""
    inner = config.zero.zero_hpz_partition_size
    halves = mesh.split_data(inner) if inner > 1 else (None, None)
    groups = DataGroups(
        {DATA_AXES: mesh.reduction, EXPERT_DATA_AXES: mesh.group("edp")},
        mesh.group("tp"),
        mesh.group("tp", "pp"),
        mesh.group("embd"),
        inner=halves[0],
        outer=halves[1],
        etp=mesh.group("etp"),
    )
    # On a GPU the operations of a communicator run one after the other.
    if mesh.device.type == "cuda" and config.zero.stage == 3:
        return groups.gathering_apart(partial(mesh.connect_apart, purpose="gathers"))
    # Long sequences are short of memory, where shared gradients add their size to the peak of activations.
    shares = config.zero.stage == 3 or mesh.group("cp").size == 1
    return groups.sharing_memory() if mesh.device.type == "cpu" and shares else groups


def _build_optimizer(
    config: RunConfig,
    mesh: Mesh,
    groups: DataGroups,
    stages: Mapping[int, nn.ModuleList],
    parameters: list[nn.Parameter],
    trains: bool,
) -> ZeroOptimizer:
    settings = ZeroSettings.from_config(config)
    if not trains:
        settings = replace(settings, frozen_masters=False, frozen_blocks=None)
    counts: dict[nn.Parameter, int] = {}
    for modules in stages.values():
        counts |= count_uses(modules)
    seed = config.train.seed
    coordinates = mesh.coordinates
    return ZeroOptimizer(
        parameters,
        settings,
        groups,
        ParameterUse.of_stages({i: list(s) for i, s in stages.items()}, counts),
        mesh.device,
        draw=lambda spec, start, out: initialize_interval(
            out, spec, start, seed, coordinates
        ),
    )


def _build_executor(
    config: RunConfig,
    mesh: Mesh,
    part: SequenceSlice,
    stages: dict[int, Stage],
    optimizer: ZeroOptimizer,
    plan: RunPlan,
    keeps_gathered: bool,
) -> Executor:
    pp_rank = mesh.coordinate("pp")
    costs = plan.stage_costs()

    def schedule(num_microbatches: int) -> Schedule:
        return plan_schedule(config, num_microbatches, keeps_gathered, costs)

    # The executor takes functions of the optimizer, and knows neither it nor the plan.
    executor = Executor(
        lambda num_microbatches: schedule(num_microbatches)[pp_rank],
        stages,
        channels_over(mesh.group("pp")),
        stage_rank=plan.shape.placement.__getitem__,
        activation_shape=lambda batch: part.hidden_shape(
            batch.seq_length, batch.size, config.model.hidden_size
        ),
        dtype=DTYPES[config.optimizer.params_dtype],
        device=mesh.device,
        hooks={
            Op.REDUCE: optimizer.arm,
            Op.TIE: optimizer.reduce_tied,
            Op.GATHER: optimizer.keep_gathered,
            Op.RELEASE: optimizer.release_gathered,
        },
    )
    executor.moments = cache(partial(_moments, schedule, pp_rank))
    return executor


def _moments(
    schedule: Callable[[int], Schedule],
    pp_rank: int,
    num_microbatches: int,
    forward: bool,
) -> Sequence[float]:
    """Return when each instruction of a rank starts, simulated for a launcher that watches devices."""
    from ..pipeline.simulate import simulate

    whole = schedule(num_microbatches)
    return simulate(forward_only(whole) if forward else whole).starts[pp_rank]
