"""Hosts and slots of a hostfile, and the choice among them, by DeepSpeed's grammar.

    worker-1 slots=4        # a line a host; text after the number is ignored
    worker-2 slots=4

`--include` and `--exclude` name hosts and slots: `worker-1@worker-2:0,2` is all of worker-1 and two slots of
worker-2. Ranks are numbered in the order of the hostfile, whatever the order of the names.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from ...errors import ConfigError
from ...host.regular_file import read_text
from ...registry import did_you_mean
from .flag_values import MOST_OF_HOST

LINE = re.compile(r"(\S+)\s+slots=(\d+)")
SEVERAL = re.compile(r"^-|[][,]")  # DeepSpeed passes such names on
MOST_DIGITS = 6  # of a number of slots
Slots = dict[str, tuple[int, ...]]
"""Host → its slots, in the order of ranks."""


def read_hostfile(path: Path) -> dict[str, int]:
    """Host → number of slots. Raises ConfigError with the line that is wrong."""
    try:
        text = read_text(path, ConfigError, f"--hostfile {path}")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--hostfile {path} cannot be read: {error}.") from error
    return parse_hostfile(text.splitlines(), str(path))


def parse_hostfile(lines: Iterable[str], name: str = "the hostfile") -> dict[str, int]:
    """Host → number of slots, of the lines of a hostfile.

    name: of the file, for messages. Raises ConfigError with the line that is wrong.
    """
    hosts: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        place = f"{name}, line {number}"
        host, slots = _entry(line, place)
        if host in hosts:
            raise ConfigError(
                f"{place}: {host} is listed twice. Add its slots to one line."
            )
        hosts[host] = slots
    # an empty file
    if not hosts:
        raise ConfigError(f"{name} lists no host: each line is HOST slots=NUMBER.")
    return hosts


def _entry(line: str, place: str) -> tuple[str, int]:
    """Return the host of a line and its slots. place: of the line, for messages"""
    found = LINE.match(line)
    if found is None:
        raise ConfigError(f"{place}: {line!r} is not HOST slots=NUMBER.")
    host = found[1]
    slots = found[2]
    if SEVERAL.search(host):
        raise ConfigError(
            f"{place}: {host} is not the name of one host: ssh and pdsh would take it for an option or for several "
            "hosts. Write a line for each."
        )
    if len(slots) > MOST_DIGITS or int(slots) > MOST_OF_HOST:
        raise ConfigError(f"{place}: slots={slots} are more than a host has.")
    return host, int(slots)


def chosen_slots(
    hosts: Mapping[str, int], include: str = "", exclude: str = ""
) -> Slots:
    """Return the slots that a choice leaves. Hosts without slots are left out.

    Raises ConfigError for hosts and slots that the hostfile lacks, and if nothing is left.
    """
    every = {host: tuple(range(count)) for host, count in hosts.items()}
    left = left_slots(every, include, exclude)
    if not any(every.values()):
        raise ConfigError(f"none of {', '.join(hosts)} has a slot: slots=0.")
    if not left:
        flag = "--exclude" if exclude else "--include"
        raise ConfigError(
            f"{flag} {exclude or include} leaves no slot of {', '.join(hosts)}."
        )
    return left


def left_slots(every: Slots, include: str = "", exclude: str = "") -> Slots:
    """Return the slots of `every` that a choice leaves, in its order; {} if nothing is left.

    Raises ConfigError for two choices, and for hosts and slots that `every` lacks.
    """
    if include and exclude:
        raise ConfigError(
            "both --include and --exclude choose the hosts; give one of them."
        )
    # The order is that of the hostfile, not that of the choice.
    flag = "--exclude" if exclude else "--include"
    text = exclude or include
    named = _asked(text, flag, every) if text else every
    left: Slots = {}
    for host, slots in every.items():
        chosen = named.get(host, ())
        kept = tuple(slot for slot in slots if (slot in chosen) != bool(exclude))
        if kept:
            left[host] = kept
    return left


def limited(slots: Slots, nodes: int | None, per_node: int | None) -> Slots:
    """Return the first nodes, and of each as many slots as given; None keeps all.

    The number of slots is not compared with the host's, as a host without GPUs may run several ranks.
    Raises ConfigError for more nodes than there are.
    """
    if nodes is not None and nodes > len(slots):
        raise ConfigError(
            f"--num_nodes {nodes}, but there are {len(slots)}: {', '.join(slots)}."
        )
    kept = list(slots.items())[:nodes]
    if per_node is None:
        return dict(kept)
    return {host: tuple(range(per_node)) for host, _ in kept}


def _asked(text: str, flag: str, every: Slots) -> Slots:
    """Host → slots of a text such as "worker-1@worker-2:0,2"; ascending, each once.

    A host that is named without slots means all of them, unless slots of it are named elsewhere in the text.
    Raises ConfigError for hosts and slots that do not exist. flag: of the text, for messages
    """
    asked: dict[str, set[int]] = {}
    for word in text.split("@"):
        host, has_slots, listed = word.partition(":")
        # A misspelt host must not be taken for one without slots.
        slots = every.get(host)
        if slots is None:
            hint = (
                did_you_mean(host, [*every]) or f". The hosts are {', '.join(every)}."
            )
            raise ConfigError(f"{flag} {text}: no host {host!r} in the hostfile{hint}")
        # The same holds for its slots.
        numbers = _numbers(listed, text, flag) if has_slots else []
        missing = set(numbers).difference(slots)
        if missing:
            raise ConfigError(
                f"{flag} {text}: {host} has {len(slots)} slots, numbered from 0; "
                f"there is no slot {min(missing)}."
            )
        asked.setdefault(host, set()).update(numbers)
    return {host: tuple(sorted(found)) or every[host] for host, found in asked.items()}


def _numbers(listed: str, text: str, flag: str) -> list[int]:
    """Return the numbers of "0,2". Raises ConfigError for another text."""
    words = listed.split(",")
    if not all(re.fullmatch(r"\s*\d+\s*", word) for word in words):
        raise ConfigError(
            f"{flag} {text}: {listed!r} is no list of slots. Write HOST:0,2, with @ between hosts."
        )
    return [int(word) for word in words]
