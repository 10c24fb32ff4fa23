"""Compiles the GPU kernels of a run before its first step.

A step that runs on tensors without memory launches nothing but names its kernels (`gpu_kernel.py`).
They are compiled together, so that no step waits for the compiler, and loaded, which may wait for the GPU:
between collectives of several ranks that is better done once, before the first. Planning that step imports
torch._dynamo, in 2 to 3 s, which rank 0 does for the start-up text anyway.

They are then compared with torch's operations in the widths that the step has, on few rows: the check of an
operation, when it is chosen, launches the kernels of another width.
"""

import logging

import torch

from ...errors import KernelError
from ...ops.kernel_table import OPERATIONS, Calls, calls_recorded
from ...planning.fake_stages import run_own_stages
from ...planning.run_plan import microbatches_of, plan_schedule
from ...training.build import Replica
from .gpu.cuda_backend import reason_against
from .gpu.gpu_kernel import Launches, compile_kernels, launches_recorded
from .gpu.self_check import check_widths

logger = logging.getLogger(__name__)


def prepare_kernels(replica: Replica) -> str:
    """Check the kernels of this rank and compile what its forward and backward launch.

    Returns a line for the log, "" without GPU kernels. Waits for no other rank. A kernel that does not
    compile is a warning: the step may not need it. One that is wrong is a warning, too: torch's operations
    compute the operation in this process.
    """
    config = replica.config
    mesh = replica.mesh
    if (
        mesh.device.type != "cuda"
        or config.train.kernels == "torch"
        or reason_against(mesh.device)
    ):
        return ""
    plan = replica.plan
    schedule = plan_schedule(
        config, microbatches_of(config), replica.keeps_gathered, plan.stage_costs()
    )
    with launches_recorded() as launches, calls_recorded() as calls:
        run_own_stages(config, mesh, plan, schedule[mesh.coordinate("pp")])
    _choose(calls, config.optimizer.optimizer)
    compiled = _compiled(launches, mesh.device)
    check_widths(calls, mesh.device)
    return compiled


def _choose(calls: Calls, optimizer: str) -> None:
    """Choose the implementations of these calls and of the optimizer, each after its check."""
    chosen = {(operation, dtype) for operation, dtype, _ in calls}
    update = OPERATIONS.get({"adam": "adamw"}.get(optimizer, optimizer))
    if update is not None:
        chosen.add((update, torch.float32))
    for operation, dtype in chosen:
        operation.first_choice("cuda", dtype)


def _compiled(launches: Launches, device: torch.device) -> str:
    try:
        return compile_kernels(launches, device)
    except KernelError as error:
        logger.warning("not all kernels were compiled before the first step: %s", error)
        return ""
