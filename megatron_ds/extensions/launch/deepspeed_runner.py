"""`deepspeed.launcher.runner`: a choice of hosts and slots under the names of DeepSpeed's launcher."""

from collections.abc import Mapping, Sequence

from . import command
from .flag_values import core_list as parse_range_list
from .hostfile import left_slots
from .hostfile import parse_hostfile as _parse_hostfile

__all__ = ["_parse_hostfile", "main", "parse_range_list", "parse_resource_filter"]


def main(args: Sequence[str] | None = None) -> int:
    """Run `megatron-ds launch` with these words; None: those of the process."""
    return command.main(args)


def parse_resource_filter(
    host_info: Mapping[str, Sequence[int]], include_str: str = "", exclude_str: str = ""
) -> dict[str, list[int]]:
    """Return the mapping host → the slots that a choice leaves; {} if it leaves none.

    host_info  host → its slots
    Raises ConfigError for both choices at once, and for hosts and slots that do not exist.
    """
    every = {host: tuple(slots) for host, slots in host_info.items()}
    left = left_slots(every, include_str, exclude_str)
    return {host: list(slots) for host, slots in left.items()}
