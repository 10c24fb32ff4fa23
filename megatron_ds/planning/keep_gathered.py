"""Whether ZeRO 3 keeps the stages of a rank gathered over a step; with "auto", memory decides.

    memory   |-- reserve --|-- state --|-- gradients --|-- activations --|-- whole weights --|-- left --|

Ranks exchange their free memory and their planned needs before the model is built, and all decide
from the same list. All stages of all ranks are kept gathered, or none, because there is one
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
from .run_plan import RunPlan, microbatches_of, plan_schedule

RESERVE = 10  # a tenth of the memory stays free: for allocators, libraries and what plans do not count
CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class MemoryBudget:
    """Bytes of one rank, if it keeps its stages gathered.

    memory   free before the model was built
    state    weights, gradients and optimizer state that this memory holds
    buffers  gradients that accumulate or are sent, hidden states sent or received
    weights  of the stages, gathered
    """

    memory: int
    state: int
    buffers: int
    activations: int
    weights: int

    @property
    def needed(self) -> int:
        """Bytes that the run needs, without the reserve."""
        return self.state + self.buffers + self.activations + self.weights

    @property
    def left(self) -> int:
        """Bytes left after the reserve; negative if the gathered stages do not fit."""
        return self.memory - self.memory // RESERVE - self.needed


@dataclass(frozen=True)
class KeepGathered:
    """The decision whether stages are kept gathered. rank, budget: of the rank with the least memory left."""

    keeps: bool
    rank: int
    budget: MemoryBudget


def decide_keep_gathered(budgets: Sequence[MemoryBudget]) -> KeepGathered:
    """Keep stages gathered if they fit on all ranks and some rank has weights. budgets: by rank."""
    tightest = min(range(len(budgets)), key=lambda rank: budgets[rank].left)
    keeps = budgets[tightest].left >= 0 and any(budget.weights for budget in budgets)
    return KeepGathered(keeps, tightest, budgets[tightest])


def agree_on_keep_gathered(
    config: RunConfig, mesh: Mesh, memory: int, run: RunPlan
) -> KeepGathered:
    """Return the decision of `decide_keep_gathered`, the same on all ranks. Collective over the world.

    memory: from `memory_of_rank`
    """
    budget = _budget(config, mesh, memory, run)
    return decide_keep_gathered(all_gather_object(budget, mesh.group("world")))


def is_automatic(config: RunConfig) -> bool:
    """Return whether memory decides, not the configuration."""
    return config.zero.stage == 3 and config.zero.zero3_pin_stage == "auto"


def keep_gathered_text(decision: KeepGathered) -> str:
    """Return a line of the start-up text: the decision and its reason."""
    b = decision.budget
    mib = lambda count: f"{count / 2**20:,.1f}"
    if not b.memory:
        return f"ZeRO 3 keeps no stage gathered: the free memory of rank {decision.rank} is unknown"
    verb = "keeps each stage gathered" if decision.keeps else "keeps no stage gathered"
    return (
        f"ZeRO 3 {verb}: rank {decision.rank}, which has the least memory left, needs {mib(b.needed)} "
        f"MiB (state {mib(b.state)}, buffers {mib(b.buffers)}, about {mib(b.activations)} of "
        f"activations, weights of the stage {mib(b.weights)}) of {mib(b.memory)} free at the start, with "
        "a reserve of 10 %"
    )


def _budget(config: RunConfig, mesh: Mesh, memory: int, run: RunPlan) -> MemoryBudget:
    """Return the plan of a step in which the stages of this rank stay gathered."""
    # Loaded by runs whose memory decides.
    from ..pipeline.simulate import Simulation
    from .fake_stages import own_stages
    from .rank_plan import data_groups, plan_rank

    count = microbatches_of(config)
    schedule = plan_schedule(config, count, True, run.stage_costs())
    position = mesh.coordinate("pp")
    program = schedule[position]
    placement = run.shape.placement
    # Messages are those of a schedule that gathers each stage once.
    plan = plan_rank(
        config,
        mesh.rank,
        data_groups(config, mesh.grid, mesh.rank, placement),
        own_stages(config, mesh, run, program),
        program,
        Simulation(schedule, (), ()).peak_messages[position],
        0,
        mesh.device.type,
    )
    in_host = plan.away.get("cpu", 0) if mesh.device.type == "cpu" else 0
    return MemoryBudget(
        memory,
        plan.state.total - sum(plan.away.values()) + in_host,
        plan.buffers - plan.gathered,
        plan.kept + plan.at_work,
        plan.gathered,
    )


# ------------------------------------------------------------------ free memory
def memory_of_rank(mesh: Mesh) -> int:
    """Free bytes of this rank's device, before it holds anything. Collective over the world.

    Ranks of a machine share a CPU's memory evenly, by the smallest of their measurements.
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
    """Return the unused part of a container's limit. Version 1 has the same numbers under other names."""
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
