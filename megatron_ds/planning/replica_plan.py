"""`ReplicaPlan`: what a rank decides before it builds anything.

    RunConfig → plan_replica → ReplicaPlan → training.build.build_replica → Replica

A dry run makes the same decisions for any rank of any world (world_plan.py).
"""

from dataclasses import dataclass

from ..config import RunConfig
from ..mpu.mesh import Mesh
from ..ops import kernel_table
from .keep_gathered import (
    agree_on_keep_gathered,
    is_automatic,
    keep_gathered_text,
    memory_of_rank,
)
from .layer_costs import measured_times
from .run_model import describe_layers, parallel_context
from .run_plan import RunPlan, plan_run


@dataclass(frozen=True)
class ReplicaPlan:
    """The decisions of one rank. All ranks have the same, but for the times by which they were made.

    run            layers, their cut into stages, the places of stages
    keeps_gathered ZeRO 3 gathers the weights of a stage once a step
    why_gathered   the reason of `keeps_gathered`; "" if the configuration states it
    """

    run: RunPlan
    keeps_gathered: bool
    why_gathered: str = ""


def plan_replica(config: RunConfig, mesh: Mesh) -> ReplicaPlan:
    """Decide how layers are cut and whether stages stay gathered. Collective over the world where a decision
    follows from measurements: times of layers (--pipeline-cut measured), free memory (--zero3-pin-stage auto).
    """
    kernel_table.select(config.train.kernels)
    # Free memory is measured first: what follows takes some.
    memory = memory_of_rank(mesh) if is_automatic(config) else 0
    ctx = parallel_context(config, mesh)
    run = plan_run(
        config, describe_layers(config, mesh), measured_times(config, mesh, ctx)
    )
    if is_automatic(config):
        decision = agree_on_keep_gathered(config, mesh, memory, run)
        return ReplicaPlan(run, decision.keeps, keep_gathered_text(decision))
    zero = config.zero
    return ReplicaPlan(run, zero.stage == 3 and zero.zero3_pin_stage == "on")
