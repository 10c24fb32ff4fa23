"""The mesh of this process, for training scripts, tools and the getters of Megatron and DeepSpeed.

Layers never read it; they receive their groups as arguments. The mesh is in a ContextVar, so that ranks
which are threads of one process have one each. A thread started later has none: call `set_mesh` in it.
"""

from contextvars import ContextVar
from datetime import timedelta

import torch

from ..errors import NotInitializedError
from .grid import DEFAULT_ORDER, Grid
from .mesh import Mesh

# Groups that a getter of `getters.py` may return on some ranks only, so they are connected on all ranks
# before.
GETTER_GROUPS = (("tp",), ("cp",), ("dp",), ("pp",), ("ep",), ("edp",), ("dp", "cp"), ("tp", "pp"),
                 ("world",), ("embd",))

_MESH: ContextVar[Mesh | None] = ContextVar("mesh", default=None)


def initialize_model_parallel(tensor_model_parallel_size: int = 1, pipeline_model_parallel_size: int = 1, *,
                              context_parallel_size: int = 1, expert_model_parallel_size: int = 1,
                              order: str = DEFAULT_ORDER, timeout: timedelta | None = None,
                              device: torch.device | str | None = None) -> Mesh:
    """Make the mesh of all ranks of torch.distributed, or of this process alone where it was not started.

    Data parallelism takes the remaining ranks. Collective over all ranks. Raises ConfigError when the sizes
    do not divide the world size.
    """
    import torch.distributed as dist

    joined = dist.is_available() and dist.is_initialized()
    world_size, rank = (dist.get_world_size(), dist.get_rank()) if joined else (1, 0)
    grid = Grid.fit(world_size, tp=tensor_model_parallel_size, cp=context_parallel_size,
                    ep=expert_model_parallel_size, pp=pipeline_model_parallel_size, order=order)
    mesh = Mesh(grid, rank, _connect(timeout) if world_size > 1 else None, device or default_device())
    mesh.connect(GETTER_GROUPS)
    set_mesh(mesh)
    return mesh


def set_mesh(mesh: Mesh | None) -> None:
    """Set the mesh of this context, the calling thread."""
    _MESH.set(mesh)


def get_mesh() -> Mesh:
    """The mesh. Raises NotInitializedError before `initialize_model_parallel` or `set_mesh`."""
    mesh = _MESH.get()
    if mesh is None:
        raise NotInitializedError("the process has no mesh yet, so there are no groups to query. Call "
                                  "mpu.initialize_model_parallel(...) first; in a new thread, call "
                                  "mpu.set_mesh(mesh).")
    return mesh


def model_parallel_is_initialized() -> bool:
    """Whether this context has a mesh."""
    return _MESH.get() is not None


def destroy_model_parallel() -> None:
    """Close the mesh's process groups and unset it; torch.distributed stays initialised."""
    if (mesh := _MESH.get()) is not None:
        mesh.close()
    set_mesh(None)


def _connect(timeout: timedelta | None):
    from .transport import connect_torch

    return lambda axes, groups, rank: connect_torch(axes, groups, rank, timeout)


def default_device() -> torch.device:
    """torch's current GPU, the CPU without one."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
