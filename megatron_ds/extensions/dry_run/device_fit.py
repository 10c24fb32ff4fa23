"""Whether the rank that needs the most memory fits its device, and what would make it fit.

    peak of the plan  |- weights -|- gradients -|- optimizer -|- buffers -|- activations -|- work -|
    device            |------------------------------- memory ----------------------------|

A remedy is a change of flags for which the configuration has room. Each is planned like the run itself, and
one that is refused or saves nothing is not listed.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...config import RunConfig, Source
from ...config.parse import check
from ...config.run import all_options
from ...errors import MegatronDSError
from ...mpu.grid import Grid
from ...planning.rank_plan import RankPlan
from ...planning.run_plan import RULES
from .longest_sequence import bytes_of
from .plan_tables import in_bytes, table
from .world_plan import WorldPlan, plan_world

TIGHT = 0.9  # above this share, libraries and allocators may take what the plan leaves
WORTH = 0.01  # of the peak: what a remedy must save to be listed
MOST_TENSOR_RANKS = 8  # ranks of one host, among which links are fast
LONG = 4096  # tokens of a rank's part of a sequence, from which on sharing it is worth its traffic


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of a device. source: where the number is from."""

    count: int
    source: str


def device_memory(config: RunConfig, device: str) -> DeviceMemory | None:
    """Return the memory of --device-memory, or that of this machine's GPU; None if neither is known.

    Raises ConfigError for a size that cannot be read.
    """
    given = config.plan.device_memory
    if given is not None:
        return DeviceMemory(bytes_of(given), f"--device-memory {given}")
    if device != "cuda" or not torch.cuda.is_available():
        return None
    found = torch.cuda.get_device_properties(0)
    return DeviceMemory(found.total_memory, f"the {found.name} of this machine")


def fits(plan: WorldPlan, memory: DeviceMemory | None) -> bool:
    """Return whether the planned peak of all ranks is within the memory; true if that is unknown."""
    return memory is None or plan.worst.peak <= memory.count


def fit_text(plan: WorldPlan, memory: DeviceMemory | None) -> Iterator[str]:
    """One line with the numbers; where the plan does not fit, also its largest parts."""
    if memory is None:
        return
    worst = plan.worst
    share = worst.peak / memory.count
    numbers = (
        f"rank {worst.rank} needs about {in_bytes(worst.peak)} of {in_bytes(memory.count)} "
        f"({memory.source})"
    )
    if not fits(plan, memory):
        yield (
            f"device: does not fit: {numbers}, {share:.2f} times as much; "
            f"{in_bytes(worst.peak - memory.count)} are missing"
        )
        parts = sorted(_parts(worst).items(), key=lambda part: -part[1])
        yield f"  largest parts: {', '.join(f'{name} {in_bytes(count)}' for name, count in parts[:3])}"
    elif share > TIGHT:
        yield (
            f"device: barely fits: {numbers}, {share:.0%}. Libraries and allocators take memory beside "
            f"it: plan for less than {TIGHT:.0%}"
        )
    else:
        yield f"device: fits: {numbers}, {share:.0%}"


def _parts(worst: RankPlan) -> dict[str, int]:
    state = worst.state
    on_device = max(state.masters + state.optimizer - sum(worst.away.values()), 0)
    return {
        "activations": worst.kept,
        "weights": state.parameters,
        "gradients": state.gradients,
        "optimizer": on_device,
        "teacher": worst.beside,
        "buffers": worst.buffers,
        "working memory": worst.at_work,
    }


def remedies_text(plan: WorldPlan, memory: DeviceMemory) -> Iterator[str]:
    """Yield a row for each remedy. Takes as long as a plan for each."""
    found = remedies(plan)
    if not found:
        yield "what would help: no change of one flag. Use more ranks, or a smaller model"
        return
    yield f"what would help, as planned for {in_bytes(memory.count)}:"
    rows = []
    for remedy in found:
        answer = "fits" if remedy.peak <= memory.count else "does not fit"
        rows.append([remedy.change, f"peak {in_bytes(remedy.peak)}", answer])
    yield from table(rows, last_left=True)


# ------------------------------------------------------------------ remedies
@dataclass(frozen=True)
class Remedy:
    """A change of flags, and the peak of the plan with it."""

    change: str
    peak: float


Change = Mapping[str, Any]  # path of an option → its value
Finder = Callable[[RunConfig, Grid], Change]


def remedies(plan: WorldPlan) -> list[Remedy]:
    """Return the changes that lower the peak, the lowest first; at the end those that keep the grid, together."""
    most = plan.worst.peak * (1 - WORTH)
    changes = [change for find in FINDERS if (change := find(plan.config, plan.grid))]
    found = [
        (change, peak)
        for change in changes
        if (peak := _peak_with(plan, change)) <= most
    ]
    found.sort(key=lambda pair: pair[1])
    result = [Remedy(_flags(change), peak) for change, peak in found]
    on_this_grid = [
        change for change, _ in found if not any(path in GRID for path in change)
    ]
    if len(on_this_grid) > 1:
        together: dict[str, Any] = {}
        for change in reversed(on_this_grid):
            together |= change
        result.append(Remedy(_flags(together), _peak_with(plan, together)))
    return result


def _peak_with(plan: WorldPlan, change: Change) -> float:
    """Return the peak of the plan with other values; infinite if that configuration is refused."""
    try:
        config = plan.config.with_values(change, Source("derived", "a remedy"))
        check(config, rules=RULES)
        return plan_world(config, 0, plan.device).worst.peak
    except MegatronDSError:
        return float("inf")


def _flags(change: Change) -> str:
    options = all_options()
    words = (
        (options[path].flag, "" if value is True else str(value))
        for path, value in change.items()
    )
    return " ".join(" ".join(filter(None, pair)) for pair in words)


ZERO = "zero.stage"
RECOMPUTE = "train.recompute_granularity"
BATCH = "train.micro_batch_size"
OFFLOAD = "zero.offload_optimizer"
TENSOR = "parallel.tensor_model_parallel_size"
SEQUENCE = "parallel.sequence_parallel"
PIPELINE = "parallel.pipeline_model_parallel_size"
CONTEXT = "parallel.context_parallel_size"
GRID = (TENSOR, PIPELINE, CONTEXT)


def _zero(stage: int) -> Finder:
    """Divide the state of the next stage over data-parallel ranks."""

    def find(config: RunConfig, grid: Grid) -> Change:
        return (
            {ZERO: stage}
            if config.zero.stage < stage and grid.size("dp", "cp") > 1
            else {}
        )

    return find


def _offload(config: RunConfig, grid: Grid) -> Change:
    return (
        {OFFLOAD: "cpu"}
        if config.zero.stage > 0 and config.zero.offload_optimizer == "none"
        else {}
    )


def _recompute(config: RunConfig, grid: Grid) -> Change:
    return {RECOMPUTE: "full"} if config.train.recompute_granularity != "full" else {}


def _smaller_batch(config: RunConfig, grid: Grid) -> Change:
    return {BATCH: 1} if config.train.micro_batch_size > 1 else {}


def _tensor(config: RunConfig, grid: Grid) -> Change:
    size = 2 * grid.tp
    return (
        {TENSOR: size, SEQUENCE: True}
        if size <= MOST_TENSOR_RANKS and grid.dp % 2 == 0
        else {}
    )


def _sequence(config: RunConfig, grid: Grid) -> Change:
    return (
        {SEQUENCE: True}
        if grid.tp > 1 and not config.parallel.sequence_parallel
        else {}
    )


def _pipeline(config: RunConfig, grid: Grid) -> Change:
    return (
        {PIPELINE: 2 * grid.pp}
        if 2 * grid.pp <= config.model.num_layers and grid.dp % 2 == 0
        else {}
    )


def _context(config: RunConfig, grid: Grid) -> Change:
    is_long = config.model.seq_length >= LONG * grid.cp
    return {CONTEXT: 2 * grid.cp} if is_long and grid.dp % 2 == 0 else {}


FINDERS: tuple[Finder, ...] = (
    _zero(1),
    _zero(2),
    _zero(3),
    _offload,
    _recompute,
    _smaller_batch,
    _sequence,
    _tensor,
    _pipeline,
    _context,
)
