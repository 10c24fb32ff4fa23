"""A rank joins the others of its job, or tells them why it does not."""

import logging
import time
from datetime import timedelta

from ..console import one_line, shortened
from ..errors import CommunicationError, MegatronDSError
from ..host import places
from .launch_facts import Launch
from .rendezvous import Place, meet, report_absence
from .stuck_ranks import register_host

MOST_CHARACTERS = 500  # of an error in the message of other ranks
logger = logging.getLogger(__name__)


def join(launch: Launch, backend: str, timeout: timedelta) -> None:
    """Start torch.distributed. Collective. Raises CommunicationError where ranks do not meet in time."""
    if launch.world_size > 1:
        _join(launch, backend, timeout)
    else:
        _join_alone(backend, timeout)


def report_error(launch: Launch, error: Exception) -> None:
    """Tell the other ranks why this one does not come."""
    report_absence(_place(launch), _in_one_line(error))


def _place(launch: Launch) -> Place:
    address = (launch.address, launch.port)
    return Place(address, launch.rank, launch.world_size, launch.file)


def _in_one_line(error: Exception) -> str:
    """Return the text of an error, which begins with its class if the error is not of this package."""
    is_ours = isinstance(error, MegatronDSError)
    text = str(error) if is_ours else f"{type(error).__name__}: {error}"
    return shortened(one_line(" ".join(text.split())), MOST_CHARACTERS)


def _join(launch: Launch, backend: str, timeout: timedelta) -> None:
    begin = time.monotonic()
    try:
        with places.WAITING:
            meet(backend, _place(launch), timeout)
            register_host()
    except (RuntimeError, ValueError, OSError) as error:
        hint = (
            "srun, not plain python, starts the ranks of a Slurm job"
            if launch.source == "Slurm"
            else "start all of them, with the same address and port, and check whether one exited with an error"
        )
        raise CommunicationError(
            f"rank {launch.rank} of {launch.world_size} (from {launch.source}) could not connect to the "
            f"other ranks at {launch.file or f'{launch.address}:{launch.port}'} within "
            f"{time.monotonic() - begin:.0f} s: {hint}; "
            f"MASTER_PORT chooses another port if this one is taken. The cause: {error}"
        ) from error


def _join_alone(backend: str, timeout: timedelta) -> None:
    """A process group of one rank. Its store is in memory: no port is taken."""
    import torch.distributed as dist

    try:
        dist.init_process_group(
            backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout
        )
    except RuntimeError as error:  # the engine itself does without
        logger.warning(
            "torch.distributed cannot be started for this one process (%s): the program can "
            "train, but not call torch.distributed itself",
            error,
        )
