"""Set up this process for a distributed run: the memory allocator, the process groups, this rank's mesh."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

import torch

from ..config import RunConfig
from ..errors import CommunicationError
from ..host import places
from ..host.allocator import set_allocator
from ..mpu import launch as launching
from ..mpu.agreement import Facts, require_agreement
from ..mpu.grid import Grid
from ..mpu.launch_facts import Launch
from ..mpu.mesh import GETTER_GROUPS, Connect, Mesh, set_mesh
from ..planning.run_model import DTYPES, boundary_shape

logger = logging.getLogger(__name__)
LARGE_HIDDEN_BYTES = 16 << 20
RANKS_DIFFER = "the ranks of this job were not started alike"
START_ALIKE = (
    "Such a run trains neither of the two. Start all ranks with the same command, configuration "
    "files, environment and installation."
)


@contextmanager
def joined(config: RunConfig, launch: Launch) -> Iterator[Mesh]:
    """Initialize the process group, yield this rank's mesh, which `mpu` has too, and close both.

    Collective over the world. Raises CommunicationError when others do not connect within the timeout, and
    ConfigError when the ranks have different options, versions or variables of the environment.
    """
    if not torch.cuda.is_available():
        set_allocator(keep_freed=not is_memory_scarce(config))
    grid = config.grid(launch.world_size)
    timeout = timedelta(minutes=config.parallel.distributed_timeout_minutes)
    device = launching.start(launch, timeout)
    if (watched := places.writer()) is not None:
        watched.phase(places.STARTING)
    try:
        connect = None
        if launch.world_size > 1:
            connect = _connection(config, grid, timeout)
        mesh = Mesh(grid, launch.rank, connect, device)
        # First of all: ranks with other options would make other groups, and wait for each other.
        facts = partial(_facts, config, device)
        require_agreement(mesh.group("world"), facts, RANKS_DIFFER, START_ALIKE)
        mesh.connect(GETTER_GROUPS)
        set_mesh(mesh)
        yield mesh
        mesh.close()
    except CommunicationError as error:
        # Groups of NCCL whose work never ends may close only when the watchdog ends the process.
        if device.type == "cuda":
            logger.error("%s", error)
        raise
    finally:
        set_mesh(None)
        launching.stop()


def _facts(config: RunConfig, device: torch.device) -> Facts:
    """Return what must be equal on all ranks."""
    from ..config.compared_values import compared_values

    return compared_values(config) | {"the kind of device": (device.type, "")}


def _connection(config: RunConfig, grid: Grid, timeout: timedelta) -> Connect:
    """Return what connects the groups of several ranks."""
    from ..mpu.nccl_settings import NcclSettings
    from ..mpu.process_groups import connect_torch

    parallel = config.parallel
    nccl = NcclSettings.over(
        grid, parallel.high_priority_stream_groups, parallel.nccl_max_ctas
    )
    return partial(connect_torch, timeout=timeout, nccl=nccl)


def is_memory_scarce(config: RunConfig) -> bool:
    """Return whether a run has options that trade time for memory, or hidden states of at least 16 MiB.

    Page faults of returned memory take time in proportion to a rank's tokens, attention to these times the
    whole sequence. So hidden states are those of whole sequences, also under context parallelism.
    """
    zero = config.zero
    train = config.train
    saves = (
        train.recompute_granularity == "full"
        or train.tiled_mlp != 1
        or train.cross_entropy_chunks != 1
        or not zero.offload_optimizer == zero.offload_param == "none"
    )
    hidden = (
        torch.Size(boundary_shape(config)).numel()
        * DTYPES[config.optimizer.params_dtype].itemsize
    )
    return saves or hidden * config.parallel.context_parallel_size >= LARGE_HIDDEN_BYTES
