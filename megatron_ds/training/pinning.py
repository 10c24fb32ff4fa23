"""Whether the stages of ZeRO 3 are pinned: as the user says, or, with "auto", where the memory of every rank allows it.

Ranks tell one another their numbers twice, before the model is built (free memory) and after (what it takes), and all decide
from the same list.
"""

import socket
from collections import Counter
from collections.abc import Mapping, Sequence

from ..config import RunConfig
from ..mpu.collectives import all_gather_object
from ..mpu.mesh import Mesh
from ..pipeline.instruction import Program
from ..zero.exchange import UNDER_WAY
from ..zero.optimizer import ZeroOptimizer
from ..zero.pinning import PinBudget, PinDecision, decide_pinning, gradient_buffers
from .activations import at_work, kept_by_stage, most_kept, workload_of
from .device_memory import free_memory


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


def agree_on_pinning(config: RunConfig, mesh: Mesh, memory: int, optimizer: ZeroOptimizer,
                     kinds: Mapping[int, Sequence[str]], program: Program) -> PinDecision:
    """The same on all ranks. Collective over the world.

    memory: of `memory_of_rank`. kinds: of the layers of each stage here. program: of this rank, for a full batch
    """
    budget = _budget(config, mesh, memory, optimizer, kinds, program)
    return decide_pinning(all_gather_object(budget, mesh.group("world")))


def _budget(config: RunConfig, mesh: Mesh, memory: int, optimizer: ZeroOptimizer, kinds: Mapping[int, Sequence[str]],
            program: Program) -> PinBudget:
    zero, places = config.zero, optimizer.memory_by_place()
    gatherings = {stage: gathering for stage in kinds if (gathering := optimizer.gathering_of(stage))}
    owner = {unit: (stage, unit.layer) for stage, gathering in gatherings.items() for unit in gathering.units}
    layers = Counter()
    for unit, layer in owner.items():
        layers[layer] += unit.numel
    work, train = workload_of(config, mesh.device.type), config.train
    recompute, recomputed = train.recompute_granularity, train.recompute_num_layers
    kept = {stage: kept_by_stage(work, layers, recompute, recomputed) for stage, layers in kinds.items()}
    activations = most_kept(program, kept) + max(at_work(work, layers, recompute) for layers in kinds.values())
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
