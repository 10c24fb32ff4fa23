"""Whether ZeRO 3 keeps the stages of a rank gathered over a step; with "auto", memory decides.

    memory   |-- reserve --|-- state --|-- gradients --|-- activations --|-- whole weights --|-- left --|

Ranks exchange their numbers twice, before the model is built (free memory) and afterwards (what it needs),
and all decide from the same list. All stages of all ranks are kept gathered, or none, because there is one
schedule: the rank with the least memory left decides.
"""

import re
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..config import RunConfig
from ..mpu.collectives import all_gather_object
from ..mpu.mesh import Mesh
from ..pipeline.instruction import Program
from ..zero.exchange import UNDER_WAY
from ..zero.optimizer import ZeroOptimizer
from .fake_stages import most_kept, run_own_stages
from .run_plan import RunPlan

RESERVE = 10  # a tenth of the memory stays free: for allocators, libraries and what plans do not count
CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class MemoryBudget:
    """Bytes of one rank, if it keeps its stages gathered.

    memory   free before the model was built
    state    weights, gradients and optimizer state that this memory holds
    weights  of the stages, gathered
    """

    memory: int
    state: int
    gradients: int
    activations: int
    weights: int

    @property
    def needed(self) -> int:
        """Bytes that the run needs, without the reserve."""
        return self.state + self.gradients + self.activations + self.weights

    @property
    def left(self) -> int:
        """Bytes left after the reserve; negative if the gathered stages do not fit."""
        return self.memory - self.memory // RESERVE - self.needed


@dataclass(frozen=True)
class KeepGathered:
    """Whether stages are kept gathered. rank, budget: of the rank with the least memory left."""

    keeps: bool
    rank: int
    budget: MemoryBudget


def decide_keep_gathered(budgets: Sequence[MemoryBudget]) -> KeepGathered:
    """Keep stages gathered if they fit on all ranks and some rank has weights. budgets: by rank."""
    tightest = min(range(len(budgets)), key=lambda rank: budgets[rank].left)
    keeps = budgets[tightest].left >= 0 and any(budget.weights for budget in budgets)
    return KeepGathered(keeps, tightest, budgets[tightest])


def agree_on_keep_gathered(
    config: RunConfig,
    mesh: Mesh,
    memory: int,
    optimizer: ZeroOptimizer,
    plan: RunPlan,
    program: Program,
) -> KeepGathered:
    """The decision of `decide_keep_gathered`, the same on all ranks. Collective over the world.

    memory: from `memory_of_rank`. program: of this rank, for a full batch
    """
    budget = _budget(config, mesh, memory, optimizer, plan, program)
    return decide_keep_gathered(all_gather_object(budget, mesh.group("world")))


def is_automatic(config: RunConfig) -> bool:
    """Whether memory decides, not the configuration."""
    return config.zero.stage == 3 and config.zero.zero3_pin_stage == "auto"


def keep_gathered_text(decision: KeepGathered) -> str:
    """A line of the start-up text: the decision and its reason."""
    b = decision.budget
    mib = lambda count: f"{count / 2**20:,.1f}"
    if not b.memory:
        return f"ZeRO 3 keeps no stage gathered: the free memory of rank {decision.rank} is unknown"
    verb = "keeps each stage gathered" if decision.keeps else "keeps no stage gathered"
    return (
        f"ZeRO 3 {verb}: rank {decision.rank}, which has the least memory left, needs {mib(b.needed)} "
        f"MiB (state {mib(b.state)}, gradient buffers {mib(b.gradients)}, about {mib(b.activations)} of "
        f"activations, weights of the stage {mib(b.weights)}) of {mib(b.memory)} free at the start, with "
        "a reserve of 10 %"
    )


def gradient_buffers(
    layers: Sequence[int], under_way: int, *, kept_whole: bool, gradient_bytes: int
) -> int:
    """Bytes of the buffers in which gradients accumulate.

    layers: elements of each. under_way: reductions at a time. kept_whole: until the last micro-batch;
    otherwise one more layer accumulates, and the weight that head and embedding share has a buffer for the
    whole backward.
    """
    whole = sum(layers)
    return (
        whole if kept_whole else min(whole, (under_way + 2) * max(layers, default=0))
    ) * gradient_bytes


def _budget(
    config: RunConfig,
    mesh: Mesh,
    memory: int,
    optimizer: ZeroOptimizer,
    plan: RunPlan,
    program: Program,
) -> MemoryBudget:
    zero = config.zero
    places = optimizer.memory_by_place()
    runs = run_own_stages(config, mesh, plan, program)
    # Elements of each layer that would stay gathered; a shared unit counts for its last stage.
    gatherings = {
        stage: gathering
        for stage in runs
        if (gathering := optimizer.gathering_of(stage))
    }
    owner = {}
    for stage, gathering in gatherings.items():
        owner |= {unit: (stage, unit.layer) for unit in gathering.units}
    layers = Counter()
    for unit, layer in owner.items():
        layers[layer] += unit.numel
    # Memory that the step needs in any case: activations, state, gradients.
    activations = most_kept(
        program, {stage: run.kept for stage, run in runs.items()}
    ) + max(run.at_work for run in runs.values())
    held = sum(
        count
        for place, count in places.items()
        if place == "device" or place == "cpu" and mesh.device.type == "cpu"
    )
    gradients = gradient_buffers(
        list(layers.values()),
        UNDER_WAY,
        kept_whole=zero.zero_accumulate == "full",
        gradient_bytes=4 if config.optimizer.gradient_dtype == "float32" else 2,
    )
    return MemoryBudget(
        memory, held, gradients, activations, sum(unit.gather_bytes for unit in owner)
    )


# ------------------------------------------------------------------ free memory
def memory_of_rank(mesh: Mesh) -> int:
    """Free bytes of this rank's device, before it holds anything. Collective over the world.

    Ranks of a machine share a CPU's memory evenly; of their measurements the smallest counts.
    """
    mine = (mesh.device.type, socket.gethostname(), free_memory(mesh.device))
    of_all = all_gather_object(mine, mesh.group("world"))
    if mesh.device.type != "cpu":
        return mine[2]
    neighbours = Counter(host for _, host, _ in of_all)[mine[1]]
    return min(free for _, host, free in of_all if host == mine[1]) // neighbours


def free_memory(device: torch.device) -> int:
    """Bytes; on a CPU those that all ranks of the machine share. 0 if unknown."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return (
            free
            + torch.cuda.memory_reserved(device)
            - torch.cuda.memory_allocated(device)
        )
    known = [
        number
        for number in (_machine(Path("/proc/meminfo")), _cgroup(CGROUP))
        if number is not None
    ]
    return min(known, default=0)


def _machine(meminfo: Path) -> int | None:
    """Linux's estimate of what is available without swapping."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", _text(meminfo), re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def _cgroup(folder: Path) -> int | None:
    """The unused part of a container's limit. Version 1 has the same numbers under other names."""
    old = (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
    )
    for limit, used, stat in (("memory.max", "memory.current", "memory.stat"), old):
        numbers = [_text(folder / name).strip() for name in (limit, used)]
        if all(number.isdigit() for number in numbers):
            cache = re.search(
                r"^(?:total_)?inactive_file (\d+)", _text(folder / stat), re.MULTILINE
            )
            return max(
                int(numbers[0]) - int(numbers[1]) + (int(cache[1]) if cache else 0), 0
            )
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
