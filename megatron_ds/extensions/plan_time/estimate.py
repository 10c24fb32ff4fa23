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


@dataclass(frozen=True)
class Estimate:
    """Seconds of a step, and bytes of the rank that needs the most."""

    seconds: float
    peak: float


@dataclass(frozen=True)
class _Totals:
    """Sums over the layers of one pipeline rank."""

    seconds: float = 0.0
    parameters: int = 0
    kept: int = 0
    at_work: int = 0

    def plus(self, record: LayerRecord, seconds: float) -> "_Totals":
        return _Totals(
            self.seconds + seconds,
            self.parameters + record.parameters,
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
) -> Estimate:
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
    update = _update_seconds(config, largest, cluster)
    peak = max(
        _peak(config, rank, at, len(ranks), microbatches, plan.shape.chunks)
        for at, rank in enumerate(ranks)
    )
    return Estimate(pipeline + behind + update, peak)


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
    found = [
        layers[at].sort for at in range(max(begin, blocks[0]), min(end, blocks[-1] + 1))
    ]
    if begin < blocks[0]:
        found.insert(0, FRONT)
    if end > blocks[-1] + 1:
        found.append(BEHIND)
    return found


def _message_seconds(config: RunConfig, links: Links) -> float:
    numbers = boundary_shape(config)
    width = DTYPES[config.optimizer.params_dtype].itemsize
    nbytes = numbers[0] * numbers[1] * numbers[2] * width
    grid = config.grid()
    return links.seconds("send", "pp", grid.pp, nbytes)


def _reduction_seconds(
    config: RunConfig, parameters: int, links: Links, last: float
) -> float:
    """Seconds of gradients and weights among data-parallel ranks behind the backward. last: of a micro-batch"""
    grid = config.grid()
    size = grid.size("dp", "cp")
    sent = config.optimizer.gradient_dtype
    gradients = parameters * DTYPES[sent].itemsize
    weights = parameters * DTYPES[config.optimizer.params_dtype].itemsize
    stage = config.zero.stage
    operation = "reduce_scatter" if stage else "all_reduce"
    reduced = links.seconds(operation, "dp-cp", size, gradients)
    if config.zero.overlap_comm is not False:
        reduced = max(0.0, reduced - 0.6 * last)
    gathered = links.seconds("all_gather", "dp-cp", size, weights) if stage else 0.0
    return reduced + gathered


def _state(config: RunConfig, parameters: int) -> tuple[float, float, float]:
    """Bytes of (weights, gradients, masters and moments) of a rank."""
    zero = config.zero.stage
    size = config.grid().size("dp", "cp")
    weight = DTYPES[config.optimizer.params_dtype].itemsize
    gradient = DTYPES[config.optimizer.gradient_dtype].itemsize
    kept = FP32 * (MOMENTS + (weight < FP32))
    return (
        parameters * weight / (size if zero >= 3 else 1),
        parameters * gradient / (size if zero >= 2 else 1),
        parameters * kept / (size if zero >= 1 else 1),
    )


def _update_seconds(config: RunConfig, parameters: int, cluster: Cluster) -> float:
    weights, gradients, kept = _state(config, parameters)
    moved = 2 * kept + 2 * gradients + weights
    device = cluster.device
    return moved / (device.bandwidth * device.constants.memory)


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
        alive = min(
            microbatches * chunks, (ranks - at - 1) * 2 + (chunks - 1) * ranks + 1
        )
    return sum(_state(config, rank.parameters)) + alive * each + rank.at_work
