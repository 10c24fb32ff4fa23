"""Whether ZeRO 3 keeps the stages of a rank gathered over a step: as the user says, or, with "auto", where memory allows it.

    memory   |-- reserve --|-- state --|-- gradients --|-- activations --|-- whole weights --|-- left --|

Ranks exchange their numbers twice, before the model is built (free memory) and after (what it takes), and all decide from the
same list. All stages are kept gathered or none: the schedule is one, and the rank with the least left decides.
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

SPARED = 10         # one in so many bytes is left alone: for allocators, libraries, and what a plan does not know
CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class PinBudget:
    """Bytes of one rank.

    memory       what was free before anything of the model was there
    state        what the rank keeps, of it in this memory
    gradients    buffers in which they fill up
    activations  allowance for them
    weights      of the stage, gathered
    """

    memory: int
    state: int
    gradients: int
    activations: int
    weights: int

    @property
    def needed(self) -> int:
        return self.state + self.gradients + self.activations + self.weights

    @property
    def left(self) -> int:
        return self.memory - self.memory // SPARED - self.needed


@dataclass(frozen=True)
class PinDecision:
    """rank, budget: of the tightest one."""

    pinned: bool
    rank: int
    budget: PinBudget


def decide_pinning(budgets: Sequence[PinBudget]) -> PinDecision:
    """budgets: of all ranks, in order. Where nothing is gathered there is nothing to pin."""
    tightest = min(range(len(budgets)), key=lambda rank: budgets[rank].left)
    fits = budgets[tightest].left >= 0 and any(budget.weights for budget in budgets)
    return PinDecision(fits, tightest, budgets[tightest])


def gradient_buffers(layers: Sequence[int], under_way: int, *, kept_whole: bool, gradient_bytes: int) -> int:
    """Bytes in which gradients fill up. layers: elements of each; under_way: reductions at a time; kept_whole: until the last
    micro-batch. Else one more fills, and one that head and embedding share does so all the while."""
    return (sum(layers) if kept_whole else min(sum(layers), (under_way + 2) * max(layers, default=0))) * gradient_bytes


def is_automatic(config: RunConfig) -> bool:
    return config.zero.stage == 3 and config.zero.zero3_pin_stage == "auto"


def memory_of_rank(mesh: Mesh) -> int:
    """Free bytes of this rank's device, before it holds anything. Collective over the world.

    A CPU's memory is shared out evenly among the ranks of its machine, by what the least of them saw.
    """
    mine = (mesh.device.type, socket.gethostname(), free_memory(mesh.device))
    everybody = all_gather_object(mine, mesh.group("world"))
    if mesh.device.type != "cpu":
        return mine[2]
    neighbours = Counter(host for _, host, _ in everybody)[mine[1]]
    return min(free for _, host, free in everybody if host == mine[1]) // neighbours


def agree_on_pinning(config: RunConfig, mesh: Mesh, memory: int, optimizer: ZeroOptimizer, plan: RunPlan,
                     program: Program) -> PinDecision:
    """The same on all ranks. Collective over the world.

    memory: of `memory_of_rank`. program: of this rank, for a full batch
    """
    budget = _budget(config, mesh, memory, optimizer, plan, program)
    return decide_pinning(all_gather_object(budget, mesh.group("world")))


def _budget(config: RunConfig, mesh: Mesh, memory: int, optimizer: ZeroOptimizer, plan: RunPlan,
            program: Program) -> PinBudget:
    zero, places = config.zero, optimizer.memory_by_place()
    runs = run_own_stages(config, mesh, plan, program)
    gatherings = {stage: gathering for stage in runs if (gathering := optimizer.gathering_of(stage))}
    owner = {unit: (stage, unit.layer) for stage, gathering in gatherings.items() for unit in gathering.units}
    layers = Counter()
    for unit, layer in owner.items():
        layers[layer] += unit.numel
    activations = most_kept(program, {stage: run.kept for stage, run in runs.items()}) + max(
        run.at_work for run in runs.values())
    held = sum(count for place, count in places.items()
               if place == "device" or place == "cpu" and mesh.device.type == "cpu")
    gradients = gradient_buffers(list(layers.values()), UNDER_WAY, kept_whole=zero.zero_accumulate == "full",
                                 gradient_bytes=4 if config.optimizer.gradient_dtype == "float32" else 2)
    return PinBudget(memory, held, gradients, activations, sum(unit.nbytes for unit in owner))


def pinning_text(decision: PinDecision) -> str:
    """For the start of a run: what was decided, and why."""
    b, mib = decision.budget, lambda count: f"{count / 2**20:,.1f}"
    if not b.memory:
        return f"ZeRO 3 keeps no stage gathered: the free memory of rank {decision.rank} is unknown"
    verb = "keeps each stage gathered" if decision.pinned else "keeps no stage gathered"
    return (f"ZeRO 3 {verb}: rank {decision.rank}, which has the least memory left, needs {mib(b.needed)} MiB "
            f"(state {mib(b.state)}, gradient buffers {mib(b.gradients)}, about {mib(b.activations)} of activations, weights "
            f"of the stage {mib(b.weights)}) of {mib(b.memory)} free at the start, with a reserve of 10 %")


def free_memory(device: torch.device) -> int:
    """Bytes; on a CPU those that all ranks of the machine share. 0 where nobody tells."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    told = [number for number in (_machine(Path("/proc/meminfo")), _cgroup(CGROUP)) if number is not None]
    return min(told, default=0)


def _machine(meminfo: Path) -> int | None:
    """What Linux believes can be had without swapping."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", _text(meminfo), re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def _cgroup(folder: Path) -> int | None:
    """What is left of a container's limit (version 2; version 1 keeps the same numbers under other names)."""
    for limit, used, stat in (("memory.max", "memory.current", "memory.stat"),
                              ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat")):
        numbers = [_text(folder / name).strip() for name in (limit, used)]
        if all(number.isdigit() for number in numbers):
            cache = re.search(r"^(?:total_)?inactive_file (\d+)", _text(folder / stat), re.MULTILINE)
            return max(int(numbers[0]) - int(numbers[1]) + (int(cache[1]) if cache else 0), 0)
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
