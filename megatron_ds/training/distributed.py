"""Set up this process for a distributed run: the memory allocator, the process groups, this rank's mesh.

Note: allocator settings on a CPU (glibc; on other systems nothing changes).

    keep freed    glibc returns large freed blocks to the kernel, and the next use of each page is a page
                  fault. Training frees and allocates the same activations every micro-batch.
    return freed  where memory is scarce: a block above 1 MiB has pages of its own, which go back to the
                  kernel when it is freed. In the heap such blocks leave holes, and by default glibc has them
                  there once the first was freed: a recomputing GPT of 14 M parameters took 280 MiB more for
                  4,096 tokens, of 1,010. Page faults cost such runs little beside the work on large tensors.
    one arena     glibc gives each thread an arena of its own, and memory freed in one serves no other.
                  Communication threads copy buckets: their arenas would be held in addition to the main one,
                  which has enough free memory when gradients are summed.
"""

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

import torch

from ..config import RunConfig
from ..mpu import launch as launching
from ..mpu.launch import Launch, connect_torch
from ..mpu.mesh import GETTER_GROUPS, Mesh, set_mesh
from ..planning.run_model import DTYPES, boundary_shape

# From glibc's <malloc.h>.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -2, -3, -4, -8
TOP_PAD_BYTES, OWN_PAGES_BYTES = 64 << 20, 1 << 20
ONE_ARENA = ((M_ARENA_MAX, 1),)
KEEP_FREED = ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, 2**31 - 1), (M_TOP_PAD, TOP_PAD_BYTES))
RETURN_FREED = ((M_MMAP_THRESHOLD, OWN_PAGES_BYTES),)
LARGE_HIDDEN_BYTES = 16 << 20


@contextmanager
def joined(config: RunConfig, launch: Launch) -> Iterator[Mesh]:
    """Initialize the process group, yield this rank's mesh, which `mpu` has too, and close both.

    Collective over the world. Raises CommunicationError when others do not connect within the timeout.
    """
    if not torch.cuda.is_available():
        set_allocator(keep_freed=not is_memory_scarce(config))
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


def is_memory_scarce(config: RunConfig) -> bool:
    """Whether a run has options that trade time for memory, or hidden states of at least 16 MiB."""
    zero, train = config.zero, config.train
    saves = (train.recompute_granularity == "full" or train.tiled_mlp != 1 or train.cross_entropy_chunks != 1
             or not zero.offload_optimizer == zero.offload_param == "none")
    hidden = torch.Size(boundary_shape(config)).numel() * DTYPES[config.optimizer.params_dtype].itemsize
    return saves or hidden >= LARGE_HIDDEN_BYTES


def set_allocator(keep_freed: bool) -> bool:
    """Use one arena, and keep or return freed memory. Returns whether glibc accepted the settings.

    Once per process, before communication threads exist: a thread chooses its arena when it starts.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)      # musl has none
    if mallopt is None:
        return False
    settings = ONE_ARENA + (KEEP_FREED if keep_freed else RETURN_FREED)
    return all([mallopt(option, value) == 1 for option, value in settings])
