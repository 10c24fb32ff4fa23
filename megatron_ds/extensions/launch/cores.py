"""The cores of a host that its ranks share out: whole physical cores, socket by socket.

Two logical cores may be threads of one physical core, and their numbers are usually far apart: equal shares of the
numbers would give one rank the second threads of another one's cores, on another socket than its GPU.
"""

import os
from collections.abc import Sequence
from pathlib import Path

SYSTEM = Path("/sys/devices/system/cpu")


def physical_cores(folder: Path = SYSTEM) -> list[list[int]]:
    """Return the physical cores that this process may use, by socket; of each its logical cores.

    A scheduler may have given a job some cores of the host. Where the kernel does not describe them, each logical
    core counts as a physical one. folder: of the kernel's description
    """
    cores: dict[tuple[int, int], list[int]] = {}
    for number in sorted(os.sched_getaffinity(0)):
        place = _place_of(number, folder)
        cores.setdefault(place, []).append(number)
    return [cores[place] for place in sorted(cores)]


def _place_of(number: int, folder: Path) -> tuple[int, int]:
    """(socket, core there) of a logical core."""
    topology = folder / f"cpu{number}" / "topology"
    try:
        socket = _number_in(topology / "physical_package_id")
        core = _number_in(topology / "core_id")
    except (OSError, ValueError):
        return 0, number
    return socket, core


def _number_in(path: Path) -> int:
    return int(path.read_text())


def share(available: Sequence[Sequence[int]], ranks: int, position: int) -> list[int]:
    """Return the logical cores for one of the ranks of a host; [] if there are fewer cores than ranks."""
    size = len(available) // ranks
    own = available[position * size :][:size]
    return sorted(number for core in own for number in core)
