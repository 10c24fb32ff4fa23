"""The devices of a host's ranks: slots of the job → the value of CUDA_VISIBLE_DEVICES.

Where the variable is set on a host, by its scheduler or the user, the launcher adds no device to those that it lists,
which may be numbers, UUIDs or parts of a GPU (MIG): slot 0 is the first entry of the list. Slots that --include and
--exclude name are numbers of devices, as with DeepSpeed's launcher, but for those of an allocation, which are its own.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from ...errors import ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"
NOTHING = ("", "-1", "NoDevFiles")  # values that hide all devices
ALLOCATIONS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID")


def is_allocated(environ: Mapping[str, str]) -> bool:
    """Return whether a scheduler has given this host's devices to a job."""
    return any(environ.get(name) for name in ALLOCATIONS)


def listed(environ: Mapping[str, str]) -> list[str] | None:
    """Return the devices that the variable lists, () if it hides all; None if it is not set."""
    text = environ.get(VISIBLE)
    if text is None:
        return None
    text = text.strip()
    return [] if text in NOTHING else [word.strip() for word in text.split(",")]


def count() -> int:
    """Return the GPUs of this machine, whichever are visible to this process."""
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def visible(slots: Sequence[int], environ: Mapping[str, str], host: str) -> str:
    """Return the value of the variable for ranks at these slots. environ: of their host, which is this one

    Raises ConfigError if the host has GPUs, and fewer of them are listed than there are ranks.
    """
    given = listed(environ)
    if given is None:
        return ",".join(map(str, slots))
    if max(slots) < len(given):
        return ",".join(given[slot] for slot in slots)
    if given and count():
        raise ConfigError(
            f"{host}: {VISIBLE}={environ[VISIBLE]} lists {len(given)} devices, and the job has slot {max(slots)} "
            f"there, counted from 0: each rank needs a device of its own. Start {len(given)} ranks on that host, or "
            "request more devices from the scheduler."
        )
    return environ[VISIBLE]  # ranks on CPUs
