"""From a config to running objects: the only file that sees the whole `RunConfig` and every room at once.

Pure decisions first (`plan_run`: how layers are cut, which program each pipeline rank runs), then the objects
(`build_engine`). Layers receive numbers and groups, never the config's root.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from ..config import RunConfig
from ..errors import MegatronDSError
from ..models import MODELS, build_stage, count_uses, gpt_loss
from ..mpu.channels import Channels
from ..mpu.group import solo
from ..mpu.mesh import Mesh
from ..optim import OPTIMIZERS
from ..pipeline import passes
from ..pipeline.executor import Executor
from ..pipeline.instruction import Op, Schedule
from ..pipeline.partition import parse_layout, partition
from ..pipeline.schedules import SCHEDULES
from ..pipeline.stage import Stage
from ..tensor_parallel.init import initialize, initialize_interval
from ..zero.optimizer import DataGroups, LayerPlan, ZeroOptimizer
from ..zero.policy import HIERARCHICAL, STAGES
from ..zero.scaler import make_scaler
from .allocator import keep_freed_memory
from .flops import layer_flops
from .offloading import make_offload
from .pinning import agree_on_pinning, is_automatic, memory_of_rank, pinning_text
from .together import together

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class RunPlan:
    """What follows from the config alone, before any tensor exists.

    layer_names  of the whole model, in order
    bounds       stage i holds layers [bounds[i], bounds[i + 1])
    costs        FLOPs of each layer for one sequence, forward and backward
    """

    layer_names: tuple[str, ...]
    bounds: tuple[int, ...]
    costs: tuple[float, ...]

    def stage_names(self, stage: int) -> tuple[str, ...]:
        return self.layer_names[self.bounds[stage]:self.bounds[stage + 1]]

    def stage_cost_shares(self) -> tuple[float, ...]:
        total = sum(self.costs) or 1.0
        return tuple(sum(self.costs[a:b]) / total for a, b in zip(self.bounds, self.bounds[1:]))


def describe_layers(config: RunConfig, mesh: Mesh) -> list:
    """The model as a list of named layers, none of them built yet.

    With parameters in shards the layers are built without memory (on the meta device): no rank ever holds the whole.
    """
    dtype = DTYPES[config.optimizer.params_dtype]
    device = torch.device("meta") if config.zero.stage == 3 else mesh.device
    return MODELS[config.model.model](
        config.model, tp=mesh.group("tp"), sequence_parallel=config.parallel.sequence_parallel, dtype=dtype,
        device=device, seed=config.train.seed, recompute_granularity=config.train.recompute_granularity,
        recompute_num_layers=config.train.recompute_num_layers)


def cut_problems(config: RunConfig) -> list[str]:
    """Why the model cannot be cut as the config says; a rule for `parse`, before there is any process group."""
    layers = MODELS[config.model.model](config.model, tp=solo("tp"))
    try:
        _cut(config, [layer.kind for layer in layers], [1.0] * len(layers))       # the vocabulary is not known yet
    except MegatronDSError as error:
        return [str(error)]
    return []


def optimizer_problems(config: RunConfig) -> list[str]:
    """Why the optimizer cannot work on shards; a rule for `parse`."""
    name, stage = config.optimizer.optimizer, config.zero.stage
    if not stage or not getattr(OPTIMIZERS[name], "needs_whole_tensors", False):
        return []
    return [f"--optimizer {name} needs whole tensors, but --zero-stage {stage} gives each rank a part of them. Use "
            "--zero-stage 0, or an optimizer that treats elements one by one, such as adam."]


RULES = (cut_problems, optimizer_problems)


def plan_run(config: RunConfig, layers: list) -> RunPlan:
    """Cut the model into pipeline stages: as the user says, else so that the costliest stage is cheapest."""
    model = config.model
    vocab = model.padded_vocab_size(config.parallel.tensor_model_parallel_size)
    kinds = [layer.kind for layer in layers]
    costs = tuple(layer_flops(model, kind, model.seq_length, vocab) for kind in kinds)
    return RunPlan(tuple(layer.name for layer in layers), _cut(config, kinds, costs), costs)


def _cut(config: RunConfig, kinds: list[str], costs) -> tuple[int, ...]:
    stages = config.parallel.pipeline_model_parallel_size
    if config.parallel.pipeline_layout:
        return parse_layout(config.parallel.pipeline_layout, kinds, stages)
    return partition(costs, stages)


def plan_schedule(config: RunConfig, num_microbatches: int, pinned: bool = False) -> Schedule:
    """The programs of all pipeline ranks for one step of `num_microbatches`. pinned: stages are gathered once (ZeRO 3)."""
    stages = config.parallel.pipeline_model_parallel_size
    schedule = SCHEDULES[config.parallel.pipeline_schedule](stages, num_microbatches)
    tied = () if config.model.untie_embeddings_and_output_weights or stages == 1 else (0, stages - 1)
    zero = config.zero
    return passes.lower(schedule, stages, tied=tied, gather=pinned,
                        reduce_each=zero.stage >= 2 and zero.zero_accumulate == "sharded")


@dataclass
class Engine:
    """The running objects of one rank.

    pinned, why_pinned  ZeRO 3 gathers a stage once a step; and what decided about it, where the config does not say
    """

    config: RunConfig
    mesh: Mesh
    plan: RunPlan
    stage: Stage
    modules: nn.Module
    parameters: list[nn.Parameter]
    optimizer: ZeroOptimizer
    executor: Executor
    pinned: bool
    why_pinned: str


def build_engine(config: RunConfig, mesh: Mesh) -> Engine:
    """Build this rank's stage and optimizer. Collective: the optimizer may gather its first parameters."""
    if mesh.device.type == "cpu":
        if config.zero.offload_optimizer == config.zero.offload_param == "none":        # else memory is what there is least of
            keep_freed_memory()
    memory = memory_of_rank(mesh) if is_automatic(config) else 0
    layers = describe_layers(config, mesh)
    plan = plan_run(config, layers)
    pp_rank = mesh.coordinate("pp")
    modules = build_stage(layers[plan.bounds[pp_rank]:plan.bounds[pp_rank + 1]])
    uses = count_uses(modules)
    parameters = list(uses)
    tp = mesh.group("tp")
    if not parameters or not parameters[0].is_meta:
        initialize(parameters, config.train.seed, tp.rank, tp.size)
    # Together: a rank's disk may be full.
    optimizer = together(mesh.group("world"), lambda: _build_optimizer(config, mesh, modules, parameters, uses))
    pinned, why_pinned = _pinning(config, mesh, memory, optimizer, layers[plan.bounds[pp_rank]:plan.bounds[pp_rank + 1]])
    gathering = optimizer.gathering_of(pp_rank)
    stage = Stage(pp_rank, list(modules), is_first=mesh.is_first_stage, is_last=mesh.is_last_stage,
                  loss=_loss_function(config, tp) if mesh.is_last_stage else None,
                  enter=gathering and gathering.enter, leave=gathering and gathering.leave,
                  complete=gathering and gathering.close)
    return Engine(config, mesh, plan, stage, modules, parameters, optimizer,
                  _build_executor(config, mesh, stage, optimizer, pinned), pinned, why_pinned)


def _pinning(config: RunConfig, mesh: Mesh, memory: int, optimizer: ZeroOptimizer, layers: list) -> tuple[bool, str]:
    """(whether stages are pinned, why). Collective over the world where that is for us to decide."""
    if not is_automatic(config):
        return config.zero.stage == 3 and config.zero.zero3_pin_stage == "on", ""
    schedule = plan_schedule(config, microbatches_of(config))
    decision = agree_on_pinning(config, mesh, memory, optimizer, [layer.kind for layer in layers], schedule)
    return decision.pinned, pinning_text(decision)


def microbatches_of(config: RunConfig) -> int:
    """Of a full batch, on each data-parallel rank."""
    return max(1, config.train.global_batch_size // config.data_parallel_size // config.train.micro_batch_size)


def _build_optimizer(config: RunConfig, mesh: Mesh, modules: nn.ModuleList, parameters: list[nn.Parameter],
                     uses: Counter) -> ZeroOptimizer:
    o, zero, tp = config.optimizer, config.zero, mesh.group("tp")
    is_hierarchical = zero.zero_hpz_partition_size > 1
    halves = mesh.split_data(zero.zero_hpz_partition_size) if is_hierarchical else (None, None)
    groups = DataGroups(mesh.group("dp", "cp"), mesh.group("edp"), tp, mesh.group("tp", "pp"), mesh.group("embd"), *halves)
    pp_rank = mesh.coordinate("pp")
    layers = {pp_rank: [list(module.parameters()) for module in modules]} if zero.stage == 3 else {}
    unread = frozenset((pp_rank, i) for i, module in enumerate(modules)
                       if not getattr(module, "weights_read_in_backward", True))
    return ZeroOptimizer(
        parameters, uses=uses, groups=groups, policy=HIERARCHICAL if is_hierarchical else STAGES[zero.stage],
        make_optimizer=partial(OPTIMIZERS[o.optimizer], settings=o), scaler=make_scaler(o),
        clip_grad=o.clip_grad, bucket_elements=bucket_elements(zero, sum(p.numel() for p in parameters)),
        overlap=zero.overlap_comm is not False, grad_dtype=DTYPES[o.gradient_dtype], device=mesh.device,
        sent_dtype=DTYPES.get(zero.sent_dtype), sent_divisor=zero.sent_divisor,
        layer_plan=LayerPlan(layers, unread, zero.prefetch_bucket_size, zero.param_persistence_threshold),
        offload=make_offload(zero, mesh.device),
        draw=lambda spec, start, out: initialize_interval(out, spec, start, config.train.seed, tp.rank, tp.size))


def bucket_elements(zero, num_parameters: int) -> int:
    """Elements of one gradient bucket: as asked for, else small enough that most of the reduction hides behind backward.

    zero: a ZeroConfig.  A shard of a bucket is contiguous, so a bucket is also what one all-gather of weights moves.
    """
    reduced = zero.reduce_bucket_size or min(max(num_parameters // 8, 1_000_000), 40_000_000)
    return min(reduced, zero.allgather_bucket_size or reduced)


def _build_executor(config: RunConfig, mesh: Mesh, stage: Stage, optimizer: ZeroOptimizer, pinned: bool) -> Executor:
    split = mesh.size("tp") if config.parallel.sequence_parallel else 1
    return Executor(
        lambda num_microbatches: plan_schedule(config, num_microbatches, pinned)[stage.index],
        {stage.index: stage}, Channels(mesh.group("pp")), stage_rank=lambda index: index,
        activation_shape=lambda batch: (batch.seq_length // split, batch.size, config.model.hidden_size),
        dtype=DTYPES[config.optimizer.params_dtype], device=mesh.device,
        hooks={Op.REDUCE: optimizer.arm, Op.TIE: optimizer.reduce_tied,
               Op.GATHER: optimizer.pin, Op.RELEASE: optimizer.unpin})


def _loss_function(config: RunConfig, tp) -> Callable:
    return partial(gpt_loss, tp=tp, vocab_size=config.model.vocab_size, label_smoothing=config.train.label_smoothing,
                   per_token=config.train.calculate_per_token_loss)
