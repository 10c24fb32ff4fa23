"""What follows from the config alone, before any tensor exists: the cut into stages, where they live, who does what when.

Pure: the same on every rank and in a process of its own. `build.py` makes the objects that carry it out.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..config import RunConfig
from ..errors import MegatronDSError
from ..models import MODELS, Layer
from ..mpu.group import solo
from ..optim import OPTIMIZERS
from ..pipeline import passes
from ..pipeline.costs import StageCosts
from ..pipeline.instruction import Op, Program, Schedule
from ..pipeline.schedules import SCHEDULES, placement, stages_of
from ..pipeline.stage_bounds import count_stages, parse_layout, partition
from ..ramps import make_batch_size
from .layer_costs import LayerCost, Times, layer_costs, reckoned_times

# Option of a schedule's function → the field of the config that gives it.
SCHEDULE_OPTIONS = {"memory_limit": "pipeline_memory_limit", "group_size": "microbatch_group_size_per_virtual_pipeline_stage"}
MOMENTS = {Op.GATHER: "pin", Op.F: "forward", Op.B: "backward", Op.I: "backward", Op.RELEASE: "unpin"}


@dataclass(frozen=True)
class PipelineShape:
    """Which schedule, over how many ranks, with how many chunks of the model on each."""

    schedule: str
    size: int
    chunks: int

    @property
    def num_stages(self) -> int:
        return self.size * self.chunks

    @cached_property
    def placement(self) -> tuple[int, ...]:
        """Global stage → pipeline rank."""
        return placement(self.schedule, self.size, self.chunks)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        return stages_of(rank, self.placement)


@dataclass(frozen=True)
class RunPlan:
    """How the model is cut.

    layer_names  of the whole model, in order
    bounds       stage i holds layers [bounds[i], bounds[i + 1])
    layer_costs  what the cut was made by
    shape        of the pipeline
    times        of layers and transfers
    layer_kinds  which of `times` is whose
    kinds        of the layers, as `models.Layer.sort` has them
    """

    layer_names: tuple[str, ...]
    bounds: tuple[int, ...]
    layer_costs: tuple[LayerCost, ...]
    shape: PipelineShape
    times: Times
    layer_kinds: tuple[str, ...]
    kinds: tuple[str, ...]

    def slice_of(self, stage: int) -> slice:
        """The stage's part of the list of layers."""
        return slice(self.bounds[stage], self.bounds[stage + 1])

    def stage_names(self, stage: int) -> tuple[str, ...]:
        return self.layer_names[self.slice_of(stage)]

    @property
    def costs(self) -> tuple[float, ...]:
        return tuple(cost.total for cost in self.layer_costs)

    def stage_cost_shares(self) -> tuple[float, ...]:
        total = sum(self.costs) or 1.0
        return tuple(sum(self.costs[a:b]) / total for a, b in zip(self.bounds, self.bounds[1:]))

    def stage_costs(self) -> StageCosts:
        """What schedules are planned and judged by: times, in parts of the mean forward of a stage."""
        times = [self.times.layers[kind] for kind in self.layer_kinds]
        stages = [times[self.slice_of(stage)] for stage in range(self.shape.num_stages)]
        unit = sum(cost.forward for cost in times) / len(stages) or 1.0
        of = lambda part: tuple(sum(getattr(cost, part) for cost in stage) / unit for stage in stages)
        return StageCosts(of("forward"), of("input_grad"), of("weight_grad"), self.times.transfer / unit)


def pipeline_shape(config: RunConfig) -> PipelineShape:
    """Several chunks without the name of a schedule mean interleaved 1F1B, as in Megatron. Raises ConfigError."""
    p, chunks = config.parallel.pipeline_model_parallel_size, config.pipeline_chunks
    if chunks is None and config.parallel.pipeline_layout:
        chunks = max(1, count_stages(config.parallel.pipeline_layout) // p)
    said = config.parallel.pipeline_schedule
    name = SCHEDULES.name_of(said) if said else "interleaved" if chunks and chunks > 1 else "1f1b"
    return PipelineShape(name, p, chunks or (2 if name == "interleaved" else SCHEDULES[name].default_chunks))


def plan_run(config: RunConfig, layers: Sequence[Layer], measured: Times | None = None) -> RunPlan:
    """Cut the model into pipeline stages: as the user says, else so that the costliest stage is cheapest.

    measured: must be given where --pipeline-cut is "measured"
    """
    shape = pipeline_shape(config)
    kinds = [layer.kind for layer in layers]
    found = measured.layers if measured else layer_costs(config, layers)
    of_layers = tuple(found[kind] for kind in kinds)
    bounds = _cut(config, kinds, [cost.total for cost in of_layers], shape.num_stages)
    return RunPlan(tuple(layer.name for layer in layers), bounds, of_layers, shape, measured or reckoned_times(config, layers),
                   tuple(kinds), tuple(layer.sort for layer in layers))


def _cut(config: RunConfig, kinds: list[str], costs: Sequence[float], stages: int) -> tuple[int, ...]:
    if config.parallel.pipeline_layout:
        return parse_layout(config.parallel.pipeline_layout, kinds, stages)
    return partition(costs, stages)


def plan_schedule(config: RunConfig, num_microbatches: int, pinned: bool = False,
                  costs: StageCosts | None = None) -> Schedule:
    """The programs of all pipeline ranks for one step of `num_microbatches`.

    pinned: stages are gathered once (ZeRO 3).  costs: of the stages, for schedules that look at them
    """
    shape, zero = pipeline_shape(config), config.zero
    schedule = order(config, shape, num_microbatches, costs)
    ends = (0, shape.num_stages - 1)
    apart = shape.placement[ends[0]] != shape.placement[ends[1]]        # on one rank they share the parameter itself
    tied = ends if apart and not config.model.untie_embeddings_and_output_weights else ()
    return passes.lower(schedule, shape.num_stages, tied=tied, gather=pinned,
                        reduce_each=zero.stage >= 2 and zero.zero_accumulate == "sharded")


def order(config: RunConfig, shape: PipelineShape, num_microbatches: int, costs: StageCosts | None = None) -> Schedule:
    """F, B, I and W as the registered function orders them."""
    known = {"costs": costs} | {name: getattr(config.parallel, field) for name, field in SCHEDULE_OPTIONS.items()}
    given = {name: known[name] for name in SCHEDULES[shape.schedule].options if known[name] is not None}
    return SCHEDULES[shape.schedule](shape.size, num_microbatches, shape.chunks, **given)


def microbatches_of(config: RunConfig) -> int:
    """Of a full batch, on each data-parallel rank."""
    return max(1, config.train.global_batch_size // config.data_parallel_size // config.train.micro_batch_size)


def moments_of(program: Program) -> Iterable[tuple[str, int]]:
    """When which stage's weights are needed: what `zero.traffic.count_gathers` wants to know of a program."""
    return [(MOMENTS[i.op], i.stage) for i in program if i.op in MOMENTS]


# ---------------------------------------------------------------------------------------------------- rules for `parse`
def schedule_problems(config: RunConfig) -> list[str]:
    """Why the schedule cannot serve the run's numbers of chunks and micro-batches, or would not look at an option."""
    try:
        shape = pipeline_shape(config)
        for num_microbatches in {microbatches_of(config), config.microbatches(make_batch_size(config).smallest)}:
            SCHEDULES[shape.schedule].check(shape.size, num_microbatches, shape.chunks)
        order(config, shape, num_microbatches=1)                            # an option may be out of its range
    except MegatronDSError as error:
        return [str(error)]
    given = {name: getattr(config.parallel, field) for name, field in SCHEDULE_OPTIONS.items()}
    return [f"--{SCHEDULE_OPTIONS[name].replace('_', '-')} {value} is for --pipeline-schedule "
            f"{' or '.join(other for other in SCHEDULES if name in SCHEDULES[other].options)}; {shape.schedule} has no use "
            "for it. Remove it, or use that."
            for name, value in given.items() if value is not None and name not in SCHEDULES[shape.schedule].options]


def cut_problems(config: RunConfig) -> list[str]:
    """Why the model cannot be cut as the config says, before there is any process group."""
    layers = MODELS[config.model.model](config.model, tp=solo("tp"))
    try:
        shape = pipeline_shape(config)
        _cut(config, [layer.kind for layer in layers], [1.0] * len(layers), shape.num_stages)     # costs are not known yet
    except MegatronDSError as error:
        return [str(error)]
    return []


def optimizer_problems(config: RunConfig) -> list[str]:
    """Why the optimizer cannot work on shards."""
    name, stage = config.optimizer.optimizer, config.zero.stage
    if not stage or not getattr(OPTIMIZERS[name], "needs_whole_tensors", False):
        return []
    return [f"--optimizer {name} needs whole tensors, but --zero-stage {stage} gives each rank a part of them. Use "
            "--zero-stage 0, or an optimizer that treats elements one by one, such as adam."]


RULES = (schedule_problems, cut_problems, optimizer_problems)
