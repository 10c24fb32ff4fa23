"""Seconds and bytes of a layout, added up from records of its layers, without a plan of all stages.

    stage     the sum of its layers
    pipeline  m micro-batches on the slowest rank, and the filling of the pipeline, which chunks shorten
    memory    weights, gradients and optimizer by ZeRO's stage; activations of as many micro-batches as the schedule
              keeps; the layer at work

A search orders layouts by these numbers; what it shows is planned whole.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from ...config import RunConfig
from ...models import Layer
from ...mpu.grid import Grid
from ...pipeline.instruction import Op
from ...planning.run_model import DTYPES, boundary_shape
from ...planning.run_plan import PipelineShape, RunPlan, microbatches_of, plan_run
from .cluster import Cluster
from .layer_record import BEHIND, FRONT, LayerRecord, Records
from .link_time import Links
from .stage_time import phase_time

FP32 = 4
MOMENTS = 2  # of Adam
BACKWARD_SHARE = 2 / 3  # of a micro-batch


@dataclass(frozen=True)
class LayoutEstimate:
    """Seconds of a step, and bytes of the rank that needs the most."""

    seconds: float
    peak: float


@dataclass(frozen=True)
class _Totals:
    """Sums over the layers of one pipeline rank; at_work: bytes that a stage needs beside what it keeps."""

    seconds: float = 0.0
    parameters: int = 0
    of_experts: int = 0
    kept: int = 0
    at_work: int = 0

    def plus(self, layers: Sequence[tuple[LayerRecord, float]]) -> "_Totals":
        """Return the sums with the layers of one more stage, and their seconds.

        While a layer runs, only the layers before it keep something: those behind it have not begun, or their
        backward is over.
        """
        found = vars(self).copy()
        # From the last layer on, with what those from each on keep.
        from_here = 0
        for record, seconds in reversed(layers):
            from_here += record.kept
            beside = record.at_work + record.kept - from_here
            found["at_work"] = max(found["at_work"], beside)
            found["seconds"] += seconds
            found["parameters"] += record.parameters
            found["of_experts"] += record.of_experts
            found["kept"] += record.kept
        return _Totals(**found)


def seconds_of_sorts(
    records: Records, cluster: Cluster, config: RunConfig
) -> dict[str, float]:
    """Return sort of layer → seconds of a micro-batch, forward and backward."""
    links = Links(cluster, config.grid())
    return {
        sort: sum(
            phase_time(record.work.of(op), cluster.device, links).seconds
            for op in (Op.F, Op.B)
        )
        for sort, record in records.items()
    }


def estimate(
    config: RunConfig,
    layers: Sequence[Layer],
    records: Records,
    seconds: Mapping[str, float],
    cluster: Cluster,
) -> LayoutEstimate:
    """Return the estimate for a configuration with these layers, which have these records and seconds.

    Raises LayoutError or ConfigError for a model that cannot be cut into the stages.
    """
    grid = config.grid()
    links = Links(cluster, grid)
    plan = plan_run(config, layers)
    ranks = _totals_of_ranks(plan, records, seconds)
    microbatches = microbatches_of(config)
    # The slowest rank sets the pace; the others wait until the first micro-batch arrives, and at the end.
    slowest = max(rank.seconds for rank in ranks)
    filling = sum(rank.seconds for rank in ranks) - slowest
    message = _message_seconds(config, links)
    pipeline = microbatches * slowest + filling / plan.shape.chunks
    pipeline += 2 * (len(ranks) - 1) * message
    largest = max(rank.parameters for rank in ranks)
    behind = _reduction_seconds(config, largest, links, ranks[0].seconds)
    update = max(_update_seconds(config, grid, rank, cluster) for rank in ranks)
    # The rank that needs the most memory.
    peak = 0.0
    for at, rank in enumerate(ranks):
        state = sum(_state(config, grid, rank))
        activations = _activations(rank, at, plan.shape, microbatches)
        peak = max(peak, state + activations)
    return LayoutEstimate(pipeline + behind + update, peak)


def _totals_of_ranks(
    plan: RunPlan, records: Records, seconds: Mapping[str, float]
) -> list[_Totals]:
    """Return the sums of each pipeline rank."""
    ranks = [_Totals() for _ in range(plan.shape.size)]
    for stage, (begin, end) in enumerate(pairwise(plan.bounds)):
        at = plan.shape.placement[stage]
        sorts = _sorts(plan, begin, end)
        ranks[at] = ranks[at].plus([(records[sort], seconds[sort]) for sort in sorts])
    return ranks


def _sorts(plan: RunPlan, begin: int, end: int) -> list[str]:
    """Return the sorts of the layers of a stage, with what is in front of and behind the blocks as one each."""
    layers = plan.layers
    blocks = [at for at, layer in enumerate(layers) if layer.is_block]
    first = blocks[0]
    behind = blocks[-1] + 1
    middle = layers[max(begin, first) : min(end, behind)]
    found = [layer.sort for layer in middle]
    if begin < first:
        found.insert(0, FRONT)
    if end > behind:
        found.append(BEHIND)
    return found


def _message_seconds(config: RunConfig, links: Links) -> float:
    numbers = prod(boundary_shape(config))
    width = DTYPES[config.optimizer.params_dtype].itemsize
    size = config.grid().pp
    return links.seconds("send", "pp", size, numbers * width)


def _reduction_seconds(
    config: RunConfig, parameters: int, links: Links, last: float
) -> float:
    """Seconds of gradients and weights among data-parallel ranks behind the backward. last: of a micro-batch"""
    grid = config.grid()
    size = grid.size("dp", "cp")
    optimizer = config.optimizer
    gradients = parameters * DTYPES[optimizer.gradient_dtype].itemsize
    stage = config.zero.stage
    operation = "reduce_scatter" if stage else "all_reduce"
    reduced = links.seconds(operation, "dp-cp", size, gradients)
    # Most of it is hidden behind the last backward.
    if config.zero.overlap_comm is not False:
        hidden = min(reduced, BACKWARD_SHARE * last) * links.cluster.overlap
        reduced -= hidden
    if not stage:
        return reduced
    weights = parameters * DTYPES[optimizer.params_dtype].itemsize
    gathered = links.seconds("all_gather", "dp-cp", size, weights)
    return reduced + gathered


def _state(config: RunConfig, grid: Grid, rank: _Totals) -> tuple[float, float, float]:
    """Bytes of (weights, gradients, masters and moments) of a rank."""
    optimizer = config.optimizer
    weight = DTYPES[optimizer.params_dtype].itemsize
    gradient = DTYPES[optimizer.gradient_dtype].itemsize
    kept = FP32 * MOMENTS
    if weight < FP32:
        kept += FP32  # a master of each weight
    # Stage 1 divides the last of these, 2 the gradients as well, 3 all: over the ranks that hold the same ones.
    held = rank.parameters
    shard = (held - rank.of_experts) / grid.size("dp", "cp")
    shard += rank.of_experts / grid.size("edp")
    elements = [shard if config.zero.stage >= stage else held for stage in (3, 2, 1)]
    return (
        elements[0] * weight,
        elements[1] * gradient,
        elements[2] * kept,
    )


def _update_seconds(
    config: RunConfig, grid: Grid, rank: _Totals, cluster: Cluster
) -> float:
    weights, gradients, kept = _state(config, grid, rank)
    moved = 2 * (kept + gradients) + weights
    device = cluster.device
    bandwidth = device.bandwidth * device.constants.memory
    return moved / bandwidth


def _activations(
    rank: _Totals, at: int, shape: PipelineShape, microbatches: int
) -> float:
    """Return the bytes that a pipeline rank keeps and works on, under 1F1B, interleaved if it has several stages.

    at: its position in the pipeline
    """
    ranks = shape.size
    chunks = shape.chunks
    each = rank.kept / chunks
    alive = min(microbatches, ranks - at) * chunks
    if chunks > 1:
        warm_up = 2 * (ranks - at - 1) + (chunks - 1) * ranks
        alive = min(microbatches * chunks, warm_up + 1)
    return alive * each + rank.at_work
