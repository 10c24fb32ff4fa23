"""Joining the other ranks: from a launch and a config to this rank's mesh."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

import torch

from ..config import RunConfig
from ..mpu import launch as launching
from ..mpu.launch import Launch
from ..mpu.mesh import GETTER_GROUPS, Mesh, set_mesh
from ..mpu.transport import connect_torch
from .allocator import set_allocator


@contextmanager
def joined(config: RunConfig, launch: Launch) -> Iterator[Mesh]:
    """Meet the other ranks, make this rank's groups (which `mpu`'s getters answer from too), and leave again at the end.

    Collective over the world. Raises CommunicationError when the others do not come.
    """
    zero = config.zero
    if not torch.cuda.is_available():       # where state is offloaded, memory is what there is least of
        set_allocator(keep_freed=zero.offload_optimizer == zero.offload_param == "none")
    grid = config.grid(launch.world_size)
    timeout = timedelta(minutes=config.parallel.distributed_timeout_minutes)
    device = launching.start(launch, timeout)
    try:
        mesh = Mesh(grid, launch.rank, partial(connect_torch, timeout=timeout), device)
        mesh.connect(GETTER_GROUPS)
        set_mesh(mesh)
        yield mesh
        mesh.close()
    finally:
        set_mesh(None)
        launching.stop()
