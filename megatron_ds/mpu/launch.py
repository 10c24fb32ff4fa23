"""`Launch`: rank, world size and address from the launcher's environment; starts and stops torch.distributed.

Supported launchers: torchrun (and others that set its variables), Slurm's srun, the launchers of MPI, Flux, or none,
which is one rank (`launch_env`). Training scripts of one rank open no socket and make no process group; programs
around an engine get one, since they may call torch.distributed themselves.
"""

import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch

from ..errors import ConfigError
from ..host import places
from ..host.file_limit import check_file_limit
from ..launch_env import (
    LONE_RANKS,
    MPI,
    TORCHRUN,
    variables_in,
)
from . import flight_recorder
from .launch_facts import Launch, integer_in

DEFAULT_TIMEOUT = timedelta(minutes=10)


def read_launch(env: Mapping[str, str] | None = None) -> Launch:
    """Return the launch that `env` (default: os.environ) describes. ConfigError names a wrong variable."""
    return _checked(_launch_in(os.environ if env is None else env))


@contextmanager
def reported_to_others(launch: Launch | None = None) -> Iterator[None]:
    """Inside, before this rank meets the others, an error is also reported to them, so that they end, too.

    launch: by default that of os.environ
    """
    try:
        yield
    except Exception as error:
        with suppress(ConfigError):  # without an address there is no place for a report
            launch = launch or _launch_in(os.environ)
            if launch.world_size > 1:
                from .joining import report_error

                report_error(launch, error)
        raise


def _launch_in(env: Mapping[str, str]) -> Launch:
    found = variables_in(env)
    if found is None:
        _check_alone(env)
        return Launch()
    # What a launcher's variables mean is loaded where there is a launcher.
    from .launchers import launch_of

    return launch_of(found, env)


def _check_alone(env: Mapping[str, str]) -> None:
    """Raises ConfigError if half of a launcher's variables show that this process is one of several."""
    if env.get(TORCHRUN.rank):
        raise ConfigError(
            "RANK is set but WORLD_SIZE is not: a launcher sets both. Start with torchrun, or "
            "unset RANK."
        )
    # A number of ranks, and no rank. In a shell of Slurm or Flux that is the size of the allocation.
    for family in (TORCHRUN, *MPI):
        name = family.sizes[0]
        if env.get(name) and family.launcher != "Flux" and integer_in(env, name) > 1:
            raise ConfigError(
                f"{name}={env[name]} is set but {family.rank} is not: each of {env[name]} processes would train alone, "
                f"as rank 0 of 1. Start them with a launcher, which sets both, or unset {name}."
            )
    for name, launcher in LONE_RANKS.items():
        if env.get(name) and integer_in(env, name) > 0:
            raise ConfigError(
                f"{launcher} started this process as number {env[name]} ({name}), and does not set how many there "
                "are. Set RANK, WORLD_SIZE, LOCAL_RANK and MASTER_ADDR in each process, or start with torchrun."
            )


def start(
    launch: Launch, timeout: timedelta = DEFAULT_TIMEOUT, alone: bool = False
) -> torch.device:
    """Start torch.distributed unless there is one rank; returns the device of this rank. Collective.

    alone: start it for one rank, too

    Where there are GPUs, its groups have NCCL alone, else gloo. Raises CommunicationError when other ranks do not
    connect in time, have another world size, or ended by an error.
    """
    with reported_to_others(launch):
        places.open_places(os.environ, launch.rank)
        device = torch.device("cpu")
        if torch.cuda.is_available():
            device = _own_device(launch)
            torch.cuda.set_device(device)
            flight_recorder.switch_on(os.environ)
        if launch.world_size > 1:
            check_file_limit(launch.world_size)
    if launch.world_size > 1 or alone:
        from .joining import join

        join(launch, "nccl" if device.type == "cuda" else "gloo", timeout)
    return device


def stop() -> None:
    """Stop torch.distributed; does nothing where it was not started."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        from .control import forget

        forget()
        dist.destroy_process_group()


def _checked(launch: Launch) -> Launch:
    if not (
        0 <= launch.rank < launch.world_size
        and 0 <= launch.local_rank < launch.local_world_size
    ):
        raise ConfigError(
            f"{launch.source} gives rank {launch.rank} of {launch.world_size}, local rank "
            f"{launch.local_rank} of {launch.local_world_size}: ranks are numbered from 0, so "
            "each is smaller than its world size."
        )
    return launch


def _own_device(launch: Launch) -> torch.device:
    """Return the GPU of this rank: the only visible one where the launcher binds one GPU to each task."""
    count = torch.cuda.device_count()
    # The numbers are the same on all ranks of a host.
    if count > 1 and max(launch.local_rank + 1, launch.local_world_size) > count:
        raise ConfigError(
            f"{launch.local_world_size} ranks were started on {platform.node()}, which shows "
            f"{count} GPUs: each rank needs its own. Start {count} ranks on it at most."
        )
    return torch.device("cuda", launch.local_rank if count > 1 else 0)
