"""Seconds and bytes of a layout, added up from records of its layers, without a plan of all stages.

    stage     the sum of its layers
    pipeline  m micro-batches on the slowest rank, and the filling of the pipeline, which chunks shorten
    memory    weights, gradients and optimizer by ZeRO's stage; activations of as many micro-batches as the schedule
              keeps; the layer at work

A search orders layouts by these numbers; what it shows is planned whole.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from ...config import RunConfig
from ...mpu.fake_group import fake_mesh
from ...pipeline.instruction import Op
from ...planning.run_model import DTYPES, boundary_shape, describe_layers
from ...planning.run_plan import RunPlan, microbatches_of, plan_run
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
    """Sums over the layers of one pipeline rank."""

    seconds: float = 0.0
    parameters: int = 0
    of_experts: int = 0
    kept: int = 0
    at_work: int = 0

    def plus(self, record: LayerRecord, seconds: float) -> "_Totals":
        return _Totals(
            self.seconds + seconds,
            self.parameters + record.parameters,
            self.of_experts + record.of_experts,
            self.kept + record.kept,
            max(self.at_work, record.at_work),
        )


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
    records: Records,
    seconds: Mapping[str, float],
    cluster: Cluster,
) -> LayoutEstimate:
    """Return the estimate for a configuration whose layers have these records and seconds.

    Raises LayoutError or ConfigError for a model that cannot be cut into the stages.
    """
    grid = config.grid()
    links = Links(cluster, grid)
    plan = plan_run(config, describe_layers(config, fake_mesh(grid, 0)))
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
    update = max(_update_seconds(config, rank, cluster) for rank in ranks)
    peak = max(
        _peak(config, rank, at, len(ranks), microbatches, plan.shape.chunks)
        for at, rank in enumerate(ranks)
    )
    return LayoutEstimate(pipeline + behind + update, peak)


def _totals_of_ranks(
    plan: RunPlan, records: Records, seconds: Mapping[str, float]
) -> list[_Totals]:
    """Return the sums of each pipeline rank."""
    ranks = [_Totals() for _ in range(plan.shape.size)]
    for stage, (begin, end) in enumerate(pairwise(plan.bounds)):
        at = plan.shape.placement[stage]
        for sort in _sorts(plan, begin, end):
            ranks[at] = ranks[at].plus(records[sort], seconds[sort])
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
        hidden = BACKWARD_SHARE * last
        reduced = max(0.0, reduced - hidden)
    if not stage:
        return reduced
    weights = parameters * DTYPES[optimizer.params_dtype].itemsize
    gathered = links.seconds("all_gather", "dp-cp", size, weights)
    return reduced + gathered


def _state(config: RunConfig, rank: _Totals) -> tuple[float, float, float]:
    """Bytes of (weights, gradients, masters and moments) of a rank."""
    optimizer = config.optimizer
    weight = DTYPES[optimizer.params_dtype].itemsize
    gradient = DTYPES[optimizer.gradient_dtype].itemsize
    kept = FP32 * MOMENTS
    if weight < FP32:
        kept += FP32  # a master of each weight
    # Stage 1 divides the last of these, 2 the gradients as well, 3 all: over the ranks that hold the same ones.
    grid = config.grid()
    held = rank.parameters
    shard = (held - rank.of_experts) / grid.size("dp", "cp")
    shard += rank.of_experts / grid.size("edp")
    elements = [shard if config.zero.stage >= stage else held for stage in (3, 2, 1)]
    return (
        elements[0] * weight,
        elements[1] * gradient,
        elements[2] * kept,
    )


def _update_seconds(config: RunConfig, rank: _Totals, cluster: Cluster) -> float:
    weights, gradients, kept = _state(config, rank)
    moved = 2 * (kept + gradients) + weights
    device = cluster.device
    bandwidth = device.bandwidth * device.constants.memory
    return moved / bandwidth


def _peak(
    config: RunConfig,
    rank: _Totals,
    at: int,
    ranks: int,
    microbatches: int,
    chunks: int,
) -> float:
    """Return the bytes of a pipeline rank under 1F1B, interleaved if it has several stages."""
    each = rank.kept / chunks
    alive = min(microbatches, ranks - at) * chunks
    if chunks > 1:
        warm_up = 2 * (ranks - at - 1) + (chunks - 1) * ranks
        alive = min(microbatches * chunks, warm_up + 1)
    state = sum(_state(config, rank))
    return state + alive * each + rank.at_work
