"""From a config to running objects: the only file that sees the whole `RunConfig` and every room at once.

Pure decisions are in `planning/run_plan.py` (how layers are cut, which program each pipeline rank runs); here are the objects
(`build_engine`). Layers receive numbers and groups, never the config's root.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from torch import nn

from ..config import RunConfig
from ..models import build_stages, count_uses
from ..mpu.agree import on_all_ranks
from ..mpu.channels import Channels
from ..mpu.mesh import Mesh
from ..mpu.sequence_slice import SequenceSlice
from ..optim import OPTIMIZERS
from ..pipeline.executor import Executor
from ..pipeline.instruction import Op
from ..pipeline.stage import Stage
from ..planning.keep_gathered import agree_on_pinning, is_automatic, memory_of_rank, pinning_text
from ..planning.layer_timing import measured_times
from ..planning.run_model import DTYPES, bucket_elements, describe_layers, loss_function, parallel_context
from ..planning.run_plan import RunPlan, microbatches_of, moments_of, plan_run, plan_schedule
from ..tensor_parallel.init import initialize, initialize_interval
from ..zero.optimizer import DataGroups, LayerPlan, ZeroOptimizer
from ..zero.scaler import make_scaler
from ..zero.set_plan import SHARED
from ..zero.settings import policy_of
from .batches import Batches, make_batches
from .offloading import make_offload


@dataclass
class Engine:
    """The running objects of one rank.

    batches   makes this rank's batches
    stages    of this rank, by global number
    modules   of all of them, in the model's order
    pinned, why_pinned  ZeRO 3 gathers a stage once a step; and what decided about it, where the config does not say
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
    ctx = parallel_context(config, mesh)
    layers = describe_layers(config, mesh)
    plan = plan_run(config, layers, measured_times(config, mesh, ctx))
    mesh.place_stages(plan.shape.placement)
    slices = {stage: layers[plan.slice_of(stage)] for stage in plan.shape.stages_of(mesh.coordinate("pp"))}
    built = build_stages(slices)
    modules = nn.ModuleList(module for stage in built.values() for module in stage)
    parameters = list(modules.parameters())
    if not parameters or not parameters[0].is_meta:
        initialize(parameters, config.train.seed, mesh.coordinates)
    groups = _data_groups(config, mesh)
    # Together: a rank's disk may be full.
    optimizer = on_all_ranks(mesh.group("world"), lambda: _build_optimizer(config, mesh, groups, built, parameters))
    kinds = {stage: [layer.sort for layer in layers] for stage, layers in slices.items()}
    pinned, why_pinned = _pinning(config, mesh, memory, optimizer, kinds, plan)
    stages = {index: _build_stage(config, mesh, index, list(built[index]), optimizer, plan) for index in built}
    return Engine(config, mesh, plan, make_batches(config, mesh, ctx.slice), stages, modules, parameters, optimizer,
                  _build_executor(config, mesh, ctx.slice, stages, optimizer, plan, pinned), pinned, why_pinned)


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
    groups = DataGroups(mesh.reduction, mesh.group("edp"), mesh.group("tp"), mesh.group("tp", "pp"),
                        mesh.group("embd"), *halves)
    return groups.sharing_memory() if config.zero.stage == 3 and mesh.device.type == "cpu" else groups


def _build_optimizer(config: RunConfig, mesh: Mesh, groups: DataGroups, stages: Mapping[int, nn.ModuleList],
                     parameters: list[nn.Parameter]) -> ZeroOptimizer:
    o, zero = config.optimizer, config.zero
    layers = {stage: [list(module.parameters()) for module in modules] for stage, modules in stages.items()
              if zero.stage == 3}
    unread = frozenset((stage, i) for stage, modules in stages.items() for i, module in enumerate(modules)
                       if not getattr(module, "weights_read_in_backward", True))
    uses = {stage: count_uses(modules) for stage, modules in stages.items()}
    stage_of = {}
    for stage in stages:
        stage_of |= {p: SHARED if p in stage_of else stage for p in uses[stage]}
    return ZeroOptimizer(
        parameters, uses={p: count for counts in uses.values() for p, count in counts.items()}, stage_of=stage_of,
        groups=groups, policy=policy_of(zero.stage, zero.zero_hpz_partition_size),
        make_optimizer=partial(OPTIMIZERS[o.optimizer], settings=o), scaler=make_scaler(o),
        clip_grad=o.clip_grad, bucket_elements=bucket_elements(zero, sum(p.numel() for p in parameters)),
        overlap=zero.overlap_comm is not False, grad_dtype=DTYPES[o.gradient_dtype], device=mesh.device,
        sent_dtype=DTYPES.get(zero.sent_dtype), sent_divisor=zero.sent_divisor,
        layer_plan=LayerPlan(layers, unread, zero.prefetch_bucket_size, zero.param_persistence_threshold),
        offload=make_offload(zero, mesh.device),
        draw=lambda spec, start, out: initialize_interval(out, spec, start, config.train.seed, mesh.coordinates))


def _build_executor(config: RunConfig, mesh: Mesh, part: SequenceSlice, stages: dict[int, Stage], optimizer: ZeroOptimizer,
                    plan: RunPlan, pinned: bool) -> Executor:
    pp_rank, costs = mesh.coordinate("pp"), plan.stage_costs()
    return Executor(
        lambda num_microbatches: plan_schedule(config, num_microbatches, pinned, costs)[pp_rank],
        stages, Channels(mesh.group("pp")), stage_rank=plan.shape.placement.__getitem__,
        activation_shape=lambda batch: part.hidden_shape(batch.seq_length, batch.size, config.model.hidden_size),
        dtype=DTYPES[config.optimizer.params_dtype], device=mesh.device,
        hooks={Op.REDUCE: optimizer.arm, Op.TIE: optimizer.reduce_tied,
               Op.GATHER: optimizer.pin, Op.RELEASE: optimizer.unpin})
