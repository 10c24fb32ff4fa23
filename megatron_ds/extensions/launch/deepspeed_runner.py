"""`deepspeed.launcher.runner`: a choice of hosts and slots under the names of DeepSpeed's launcher."""

import re
from collections.abc import Mapping, Sequence

from ...errors import ConfigError
from . import command
from .hostfile import left_slots
from .hostfile import parse_hostfile as _parse_hostfile

__all__ = ["_parse_hostfile", "main", "parse_range_list", "parse_resource_filter"]


def main(args: Sequence[str] | None = None) -> int:
    """`megatron-ds launch` with these words; None: those of the process."""
    return command.main(args)


def parse_resource_filter(
    host_info: Mapping[str, Sequence[int]], include_str: str = "", exclude_str: str = ""
) -> dict[str, list[int]]:
    """Host → the slots that a choice leaves; {} where it leaves none.

    host_info  host → its slots
    Raises ConfigError for both choices at once, and for hosts and slots that do not exist.
    """
    every = {host: tuple(slots) for host, slots in host_info.items()}
    left = left_slots(every, include_str, exclude_str)
    return {host: list(slots) for host, slots in left.items()}


def parse_range_list(text: str) -> list[int]:
    """The cores of a text such as "0,2-4": in ascending order, each once. Raises ConfigError otherwise."""
    cores: list[int] = []
    for word in text.split(","):
        first, last = _ends(word, text)
        if cores and first <= cores[-1]:
            raise ConfigError(
                f"{text!r}: {word!r} is not above core {cores[-1]}. Write cores in ascending order."
            )
        cores += range(first, last + 1)
    return cores


def _ends(word: str, text: str) -> tuple[int, int]:
    """The first and the last core of "2-4" or "3"."""
    found = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", word)
    if found is None:
        raise ConfigError(f"{text!r}: {word!r} is no core. Write cores as 0,2-4.")
    first = int(found[1])
    last = int(found[2] or first)
    if last < first:
        raise ConfigError(
            f"{text!r}: {word!r} ends before it begins. Write cores as 0,2-4."
        )
    return first, last
