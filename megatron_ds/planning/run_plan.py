"""`RunPlan` and the schedule: the layers of each stage, the rank of each stage, the program of each rank.

Pure functions of the configuration, the same on every rank. `training.build` makes the objects that execute
the plan.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from ..config import RunConfig
from ..config.messages import either, problems_of
from ..config.rules.group import group_rules, pattern_problems
from ..config.training_schedule import make_batch_size
from ..errors import ConfigError, MegatronDSError
from ..models import MODELS, Layer
from ..mpu.context import ParallelContext
from ..mpu.managed_parameter import spec_of
from ..optim import OPTIMIZERS
from ..pipeline import passes
from ..pipeline.instruction import Op, Program, Schedule, StageCosts
from ..pipeline.schedules import SCHEDULES, placement, stages_of
from ..pipeline.stage_bounds import count_stages, parse_layout, partition
from ..zero.settings import ZeroSettings
from ..zero.traffic import KEEP, RELEASE
from .layer_costs import LayerCost, Times, estimated_times, layer_costs
from .run_model import model_layers

# Option of a schedule's function → the field of the config that gives it.
SCHEDULE_OPTIONS = {
    "memory_limit": "pipeline_memory_limit",
    "group_size": "microbatch_group_size_per_virtual_pipeline_stage",
}
MOMENTS = {
    Op.GATHER: KEEP,
    Op.F: "forward",
    Op.B: "backward",
    Op.I: "backward",
    Op.RELEASE: RELEASE,
}


@dataclass(frozen=True)
class PipelineShape:
    """The schedule, the number of pipeline ranks, and the number of stages (chunks) on each rank."""

    schedule: str
    size: int
    chunks: int

    @property
    def num_stages(self) -> int:
        """Pipeline stages of the whole model."""
        return self.size * self.chunks

    @cached_property
    def placement(self) -> tuple[int, ...]:
        """Global stage → pipeline rank."""
        return placement(self.schedule, self.size, self.chunks)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Global numbers of the stages on a pipeline rank."""
        return stages_of(rank, self.placement)


@dataclass(frozen=True)
class RunPlan:
    """How the model is cut into stages.

    layers       of the whole model, in order, not built
    bounds       stage i holds layers [bounds[i], bounds[i + 1])
    layer_costs  by the rule --pipeline-cut, in order
    times        of layers and transfers, for schedules
    """

    layers: tuple[Layer, ...]
    bounds: tuple[int, ...]
    layer_costs: tuple[LayerCost, ...]
    shape: PipelineShape
    times: Times

    def stage_layers(self, stage: int) -> tuple[Layer, ...]:
        """Return the layers of a stage, in order."""
        return self.layers[self.bounds[stage] : self.bounds[stage + 1]]

    def stage_names(self, stage: int) -> tuple[str, ...]:
        """Global names of a stage's layers."""
        return tuple(layer.name for layer in self.stage_layers(stage))

    @property
    def costs(self) -> tuple[float, ...]:
        """Total cost of each layer."""
        return tuple(cost.total for cost in self.layer_costs)

    def stage_cost_shares(self) -> tuple[float, ...]:
        """Each stage's share of the cost of the model."""
        total = sum(self.costs) or 1.0
        return tuple(
            sum(self.costs[a:b]) / total for a, b in zip(self.bounds, self.bounds[1:])
        )

    def stage_costs(self) -> StageCosts:
        """Times for planning and comparing schedules, in units of the mean forward of a stage."""
        stages = [
            [self.times.layers[layer.kind] for layer in self.stage_layers(stage)]
            for stage in range(self.shape.num_stages)
        ]
        unit = (
            sum(cost.forward for stage in stages for cost in stage) / len(stages) or 1.0
        )
        of = lambda part: tuple(
            sum(getattr(cost, part) for cost in stage) / unit for stage in stages
        )
        return StageCosts(
            of("forward"),
            of("input_grad"),
            of("weight_grad"),
            self.times.transfer / unit,
        )


def pipeline_shape(config: RunConfig) -> PipelineShape:
    """Return the shape; chunks without a schedule mean interleaved 1F1B, as in Megatron. Raises ConfigError."""
    p = config.parallel.pipeline_model_parallel_size
    chunks = config.pipeline_chunks
    if chunks is None and config.parallel.pipeline_layout:
        chunks = max(1, count_stages(config.parallel.pipeline_layout) // p)
    given = config.parallel.pipeline_schedule
    if given:
        name = SCHEDULES.name_of(given)
    elif chunks and chunks > 1:
        name = "interleaved"
    else:
        name = "1f1b"
    return PipelineShape(
        name,
        p,
        chunks or (2 if name == "interleaved" else SCHEDULES[name].default_chunks),
    )


def plan_run(
    config: RunConfig, layers: Sequence[Layer], measured: Times | None = None
) -> RunPlan:
    """Cut the model into stages: by --pipeline-layout, or so that the costliest stage costs the least.

    measured: required with --pipeline-cut measured
    """
    shape = pipeline_shape(config)
    found = measured.layers if measured else layer_costs(config, layers)
    of_layers = tuple(found[layer.kind] for layer in layers)
    bounds = _cut(config, layers, [cost.total for cost in of_layers], shape.num_stages)
    return RunPlan(
        tuple(layers),
        bounds,
        of_layers,
        shape,
        measured or estimated_times(config, layers),
    )


def _cut(
    config: RunConfig, layers: Sequence[Layer], costs: Sequence[float], stages: int
) -> tuple[int, ...]:
    if config.parallel.pipeline_layout:
        return parse_layout(
            config.parallel.pipeline_layout,
            [layer.is_block for layer in layers],
            stages,
        )
    return partition(costs, stages)


def plan_schedule(
    config: RunConfig,
    num_microbatches: int,
    keep_gathered: bool = False,
    costs: StageCosts | None = None,
) -> Schedule:
    """Return the programs of all pipeline ranks for one step of `num_microbatches`.

    keep_gathered: stages are gathered once a step (ZeRO 3). costs: of the stages, for some schedules
    """
    shape = pipeline_shape(config)
    zero = config.zero
    schedule = order(config, shape, num_microbatches, costs)
    ends = (0, shape.num_stages - 1)
    # On one rank, embedding and head share the parameter itself.
    on_two_ranks = shape.placement[ends[0]] != shape.placement[ends[1]]
    tied = ends if on_two_ranks and ties_ends(config) else ()
    return passes.lower(
        schedule,
        shape.num_stages,
        tied=tied,
        gather=keep_gathered,
        reduce_each=zero.stage >= 2 and zero.zero_accumulate == "sharded",
    )


def ties_ends(config: RunConfig) -> bool:
    """Return whether the last layer has a weight of the first one."""
    layers = MODELS[config.model.model](config.model, ParallelContext())
    return layers[-1].tied_to is not None


def order(
    config: RunConfig,
    shape: PipelineShape,
    num_microbatches: int,
    costs: StageCosts | None = None,
) -> Schedule:
    """Return the F, B, I and W of all ranks in the order of the schedule, without transfers."""
    known = _schedule_options(config) | {"costs": costs}
    given = {
        name: known[name]
        for name in SCHEDULES[shape.schedule].options
        if known[name] is not None
    }
    return SCHEDULES[shape.schedule](
        shape.size, num_microbatches, shape.chunks, **given
    )


def _schedule_options(config: RunConfig) -> dict[str, object]:
    return {
        name: getattr(config.parallel, field)
        for name, field in SCHEDULE_OPTIONS.items()
    }


def microbatches_of(config: RunConfig) -> int:
    """Micro-batches of a full batch on each data-parallel rank."""
    train = config.train
    assert train.global_batch_size is not None  # after parsing
    return max(
        1,
        train.global_batch_size // config.data_parallel_size // train.micro_batch_size,
    )


def moments_of(program: Program) -> Iterable[tuple[str, int]]:
    """(moment, stage) whenever weights are needed or released, for `zero.prediction.count_gathers`."""
    return [(MOMENTS[i.op], i.stage) for i in program if i.op in MOMENTS]


# ------------------------------------------------------------------ rules for `parse`
def schedule_problems(config: RunConfig) -> list[str]:
    """Return why the schedule cannot run these chunks and micro-batches, and which options it does not have."""
    try:
        shape = pipeline_shape(config)
        smallest = config.microbatches(make_batch_size(config).smallest)
        for num_microbatches in {microbatches_of(config), smallest}:
            SCHEDULES[shape.schedule].check(shape.size, num_microbatches, shape.chunks)
        order(config, shape, num_microbatches=1)  # raises if an option is out of range
    except MegatronDSError as error:
        return [str(error)]
    given = _schedule_options(config)
    return [
        f"--{SCHEDULE_OPTIONS[name].replace('_', '-')} {value} is for --pipeline-schedule "
        f"{' or '.join(other for other in SCHEDULES if name in SCHEDULES[other].options)}; "
        f"{shape.schedule} has no use for it. Remove it, or use that."
        for name, value in given.items()
        if value is not None and name not in SCHEDULES[shape.schedule].options
    ]


def cut_problems(config: RunConfig) -> list[str]:
    """Return why the model cannot be cut as configured; found before process groups are created."""
    if found := list(problems_of([_more_stages_than_layers], config)):
        return found
    layers = MODELS[config.model.model](config.model, ParallelContext())
    try:
        shape = pipeline_shape(config)
        # Whether there is a cut does not depend on the costs.
        _cut(config, layers, [1.0] * len(layers), shape.num_stages)
    except MegatronDSError as error:
        return [str(error)]
    return []


def _more_stages_than_layers(config: RunConfig) -> Iterator[str]:
    """`rules.pipeline.pipeline`, with the number of stages on each rank that the schedule sets."""
    shape = pipeline_shape(config)
    layers = config.model.num_layers
    if layers < shape.num_stages and config.parallel.pipeline_layout is None:
        sizes = range(1, layers // shape.chunks + 1)
        size = f"--pipeline-model-parallel-size {either(sizes)}, " if sizes else ""
        yield (
            f"[num_layers] is less than [pipeline_model_parallel_size] × {shape.chunks}, the stages on "
            f"each rank with [pipeline_schedule]: each stage needs at least one layer. Use {size}"
            "--pipeline-schedule 1f1b, or --pipeline-layout, which can give the embedding its own stage."
        )


def optimizer_problems(config: RunConfig) -> list[str]:
    """Return why the optimizer cannot update the state that a rank holds under these settings."""
    if config.optimizer.optimizer not in OPTIMIZERS:
        return []  # the check of names reports an unknown one
    try:
        ZeroSettings.from_config(config)
    except ConfigError as error:
        return [str(error)]
    return list(_group_problems(config)) if config.optimizer.param_groups else []


def _group_problems(config: RunConfig) -> Iterator[str]:
    """Parameter groups that do not fit the parameters of the model."""
    # The tokenizer is read later; names do not depend on it.
    if config.model.vocab_size is None:
        config = replace(config, model=replace(config.model, vocab_size=1))
    ctx = ParallelContext(device=torch.device("meta"))
    layers = model_layers(config, ctx)
    described = [spec_of(p) for layer in layers for p in layer.make().parameters()]
    specs = {spec.name: spec for spec in described}
    # A rule names parameters by patterns, and may give them another optimizer.
    rules = group_rules(config.optimizer.param_groups)
    yield from pattern_problems(rules, list(specs))
    for rule in rules:
        needs = (
            rule.optimizer is not None
            and OPTIMIZERS.declared(rule.optimizer).traits.needs_matrices
        )
        others = [
            name
            for name, spec in specs.items()
            if needs and rule.matches(name) and not spec.matrices
        ]
        if others:
            yield (
                f"--param-group {rule.pattern!r} gives {others[0]} to {rule.optimizer}, which is for "
                "weights of hidden linear layers, and not for embeddings, output layers, routers, norms "
                "and biases. Use a pattern of such weights."
            )


RULES = (schedule_problems, cut_problems, optimizer_problems)
