"""Values of the launcher's flags: texts → numbers, cores and words, or what is wrong with a text.

The functions for single flags raise argparse's error, to which the name of the flag is added.
"""

import math
import re
import shlex
from argparse import ArgumentTypeError

from ...errors import ConfigError

MOST = 1_000_000  # of hosts, ranks, cores and restarts: more is a slip of the keyboard
LAST_PORT = 65_535
MOST_OF_HOST = 4_096  # ranks, or slots, of one host


def whole(text: str) -> int:
    """Return a number from 0 on."""
    return _number(text, 0, MOST)


def count(text: str) -> int | None:
    """Return a number from 1 on; None for -1, which is DeepSpeed's default."""
    return None if text == "-1" else _number(text, 1, MOST)


def ranks_of_host(text: str) -> int | None:
    """Return a number of ranks from 1 on; None for -1."""
    return None if text == "-1" else _number(text, 1, MOST_OF_HOST)


def port(text: str) -> int:
    """Return the number of a port."""
    return _number(text, 1, LAST_PORT)


def seconds(text: str) -> float:
    """Seconds from 0 on."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 <= found < math.inf:
        raise ArgumentTypeError(f"must be a number from 0 on, got {text}")
    return found


def _number(text: str, least: int, most: int) -> int:
    found = int(text) if re.fullmatch(r"-?[0-9]{1,9}", text) else least - 1
    if not least <= found <= most:
        raise ArgumentTypeError(
            f"must be a whole number from {least} to {most}, got {text}"
        )
    return found


def core_list(text: str) -> list[int]:
    """Return the cores of a text such as "0,2-4": in ascending order, each once. Raises ConfigError otherwise."""
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
    """Return the first and the last core of "2-4" or "3"."""
    found = re.fullmatch(r"\s*([0-9]{1,6})(?:-([0-9]{1,6}))?\s*", word)
    if found is None:
        raise ConfigError(f"{text!r}: {word!r} is no core. Write cores as 0,2-4.")
    first = int(found[1])
    last = int(found[2] or first)
    if last < first:
        raise ConfigError(
            f"{text!r}: {word!r} ends before it begins. Write cores as 0,2-4."
        )
    return first, last


def shell_words(text: str, name: str) -> list[str]:
    """Return the words of a text, as a shell splits it. Raises ConfigError with the name of the text."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(
            f"{name} {text}: {error}. Quotes come in pairs, as in a shell."
        ) from error
