"""The mesh of this process, for the few who may ask for it: training scripts, tools, and the getters that customers know.

Layers never read it: they are handed their groups. It lives in a ContextVar, so ranks that are threads of one process each
see their own; a thread that is started later sees none and must be given its mesh.
"""

from contextvars import ContextVar
from datetime import timedelta

import torch

from ..errors import NotInitializedError
from .grid import DEFAULT_ORDER, Grid
from .mesh import Mesh

# Groups that a getter of `getters.py` may return on some ranks alone, so they are connected on all ranks before.
GETTER_GROUPS = (("tp",), ("cp",), ("dp",), ("pp",), ("ep",), ("edp",), ("dp", "cp"), ("tp", "pp"), ("world",), ("embd",))

_MESH: ContextVar[Mesh | None] = ContextVar("mesh", default=None)


def initialize_model_parallel(tensor_model_parallel_size: int = 1, pipeline_model_parallel_size: int = 1, *,
                              context_parallel_size: int = 1, expert_model_parallel_size: int = 1,
                              order: str = DEFAULT_ORDER, timeout: timedelta | None = None,
                              device: torch.device | str | None = None) -> Mesh:
    """Cut the world of torch.distributed (or this process alone, when it was not started) into the mesh, and keep it.

    Data parallelism takes the ranks that are left. Collective over all ranks. Raises ConfigError when the sizes do not fill
    the world.
    """
    import torch.distributed as dist

    joined = dist.is_available() and dist.is_initialized()
    world_size, rank = (dist.get_world_size(), dist.get_rank()) if joined else (1, 0)
    grid = Grid.fit(world_size, tp=tensor_model_parallel_size, cp=context_parallel_size, ep=expert_model_parallel_size,
                    pp=pipeline_model_parallel_size, order=order)
    mesh = Mesh(grid, rank, _connect(timeout) if world_size > 1 else None, device or _default_device())
    mesh.connect(GETTER_GROUPS)
    set_mesh(mesh)
    return mesh


def set_mesh(mesh: Mesh | None) -> None:
    _MESH.set(mesh)


def get_mesh() -> Mesh:
    """Raises NotInitializedError before `initialize_model_parallel` or `set_mesh`."""
    mesh = _MESH.get()
    if mesh is None:
        raise NotInitializedError("the process has no mesh yet, so there are no groups to query. Call "
                                  "mpu.initialize_model_parallel(...) first; in a new thread, call mpu.set_mesh(mesh).")
    return mesh


def model_parallel_is_initialized() -> bool:
    return _MESH.get() is not None


def destroy_model_parallel() -> None:
    """Hang up the groups and forget the mesh; the world of torch.distributed stays."""
    if (mesh := _MESH.get()) is not None:
        mesh.close()
    set_mesh(None)


def _connect(timeout: timedelta | None):
    from .transport import connect_torch

    return lambda axes, groups, rank: connect_torch(axes, groups, rank, timeout)


def _default_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
