"""Compiles the GPU kernels of a run before its first step.

A step that runs on tensors without memory launches nothing but names its kernels (`ops/gpu/gpu_kernel.py`).
They are compiled together, so that no step waits for the compiler, and loaded, which may wait for the GPU:
between collectives of several ranks that is better done once, before the first. Planning that step imports
torch._dynamo, in 2 to 3 s, which rank 0 does for the start-up text anyway.
"""

import logging

from ..errors import KernelError
from ..ops.gpu.cuda_backend import reason_against
from ..ops.gpu.gpu_kernel import compile_kernels, launches_recorded
from ..ops.kernel_table import kernels_text
from ..planning.fake_stages import run_own_stages
from ..planning.run_model import DTYPES
from ..planning.run_plan import microbatches_of, plan_schedule
from .build import Engine
from .used_operations import used_operations

logger = logging.getLogger(__name__)


def prepare_kernels(engine: Engine) -> str:
    """Check the kernels of this rank and compile what its forward and backward launch.

    Returns a line for the log, "" without GPU kernels. Waits for no other rank. A kernel that does not
    compile is a warning: the step may not need it.
    """
    config, mesh = engine.config, engine.mesh
    if mesh.device.type != "cuda" or config.train.kernels == "torch" or reason_against(mesh.device):
        return ""
    used = used_operations(config, mesh.device.type)
    kernels_text(mesh.device, DTYPES[config.optimizer.params_dtype], used)      # chooses them, after checks
    plan = engine.plan
    schedule = plan_schedule(config, microbatches_of(config), engine.keeps_gathered, plan.stage_costs())
    with launches_recorded() as launches:
        run_own_stages(config, mesh, plan, schedule[mesh.coordinate("pp")])
    try:
        return compile_kernels(launches, mesh.device)
    except KernelError as error:
        logger.warning("not all kernels were compiled before the first step: %s", error)
        return ""
