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
from ...registry import did_you_mean

LINE = re.compile(r"(\S+)\s+slots=(\d+)")
Slots = dict[str, tuple[int, ...]]
"""Host → its slots, in the order of ranks."""


def read_hostfile(path: Path) -> dict[str, int]:
    """Host → number of slots. Raises ConfigError with the line that is wrong."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--hostfile {path} cannot be read: {error}.") from error
    return parse_hostfile(text.splitlines(), str(path))


def parse_hostfile(lines: Iterable[str], name: str = "the hostfile") -> dict[str, int]:
    """Host → number of slots, of the lines of a hostfile."""
    hosts: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        found = LINE.match(line)
        if found is None:
            raise ConfigError(
                f"{name}, line {number}: {line!r} is not HOST slots=NUMBER."
            )
        host, slots = found[1], int(found[2])
        if host in hosts:
            raise ConfigError(
                f"{name}, line {number}: {host} is listed twice. Add its slots to one line."
            )
        hosts[host] = slots
    if not hosts:
        raise ConfigError(f"{name} lists no host: each line is HOST slots=NUMBER.")
    return hosts


def chosen_slots(
    hosts: Mapping[str, int], include: str = "", exclude: str = ""
) -> Slots:
    """The slots that a choice leaves. Hosts without slots are left out.

    Raises ConfigError for hosts and slots that the hostfile lacks, and if nothing is left.
    """
    if include and exclude:
        raise ConfigError(
            "both --include and --exclude choose the hosts; give one of them."
        )
    every = {host: tuple(range(count)) for host, count in hosts.items()}
    if include:
        asked = _asked(include, "--include", every)
        left = {host: asked[host] for host in every if host in asked}
    elif exclude:
        refused = _asked(exclude, "--exclude", every)
        left = {
            host: tuple(slot for slot in slots if slot not in refused.get(host, ()))
            for host, slots in every.items()
        }
    else:
        left = every
    left = {host: slots for host, slots in left.items() if slots}
    if not left:
        raise ConfigError(
            f"{'--exclude ' + exclude if exclude else '--include ' + include} leaves no slot of "
            f"{', '.join(hosts)}."
        )
    return left


def limited(slots: Slots, nodes: int | None, per_node: int | None) -> Slots:
    """The first nodes, and of each as many slots as given; None keeps all."""
    if nodes is not None and nodes > len(slots):
        raise ConfigError(
            f"--num_nodes {nodes}, but there are {len(slots)}: {', '.join(slots)}."
        )
    kept = list(slots.items())[:nodes]
    if per_node is None:
        return dict(kept)
    return {host: tuple(range(per_node)) for host, _ in kept}


def _asked(text: str, flag: str, every: Slots) -> Slots:
    """Host → slots of a text such as "worker-1@worker-2:0,2"; ascending, each once."""
    asked: dict[str, set[int]] = {}
    for word in text.split("@"):
        host, has_slots, listed = word.partition(":")
        if host not in every:
            hint = did_you_mean(host, every) or f" The hosts are {', '.join(every)}."
            raise ConfigError(f"{flag} {text}: no host {host!r} in the hostfile.{hint}")
        numbers = _numbers(listed, text, flag) if has_slots else []
        missing = [number for number in numbers if number not in every[host]]
        if missing:
            raise ConfigError(
                f"{flag} {text}: {host} has {len(every[host])} slots, 0 to {len(every[host]) - 1}; "
                f"there is no slot {missing[0]}."
            )
        asked.setdefault(host, set()).update(numbers)
    # a host that is named without slots means all of them, unless slots of it are named elsewhere
    return {host: tuple(sorted(found)) or every[host] for host, found in asked.items()}


def _numbers(listed: str, text: str, flag: str) -> list[int]:
    words = listed.split(",")
    if not all(re.fullmatch(r"\s*\d+\s*", word) for word in words):
        raise ConfigError(
            f"{flag} {text}: {listed!r} is no list of slots. Write HOST:0,2, with @ between hosts."
        )
    return [int(word) for word in words]
