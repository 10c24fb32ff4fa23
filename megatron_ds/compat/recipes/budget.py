"""Bounds on what a recipe may ask of its reader: characters, seconds, files, words.

A recipe is a small text, often from a stranger. A few lines of it can double a value forty times, or start
ten thousand trainings; the reader stops at a bound and names it, instead of filling the memory.
"""

import time
from dataclasses import dataclass
from pathlib import Path

from ...host.regular_file import read_regular
from .shell_tokens import CLOSE, OPEN, ShellError

LARGEST_FILE = 1_000_000  # bytes of a recipe, and of each file that it reads
LARGEST_YAML = 200_000  # bytes; reading one takes 50 times as long as a script's
CHARACTERS = 4_000_000  # characters of all expansions together
SECONDS = 10.0  # of this process's own time
LONGEST_PATTERN = 1_000  # characters of a pattern of `case`, `[[ … ]]` and `${A%…}`
LONGEST_EXPRESSION = 1_000  # characters of `$((…))`
MOST_CONDITIONS = 1_000  # words of a test
MOST_LAUNCHES = 100  # training commands of a recipe
MOST_FLAGS = 1_000  # of a training command, or keys of a JSON
MOST_WORDS = 100_000  # of a training command: a blend of many corpora has thousands
MOST_RANKS = 10_000_000


@dataclass
class Budget:
    """What a recipe has left. characters: of values; seconds: of processor time, from the first `spend`."""

    characters: int = CHARACTERS
    seconds: float = SECONDS
    began: float | None = None

    def spend(self, characters: int) -> None:
        """Take characters, before a value with as many is made. Raises ShellError when none are left."""
        now = time.process_time()
        self.began = now if self.began is None else self.began
        self.characters -= characters
        if self.characters < 0:
            raise ShellError(
                f"its values have more than {CHARACTERS:,} characters together: this is not a "
                "recipe."
            )
        if now - self.began > self.seconds:
            raise ShellError(
                f"it takes more than {self.seconds:.0f} s to read: this is not a recipe."
            )

    def replaced(self, text: str, old: str, new: str, count: int = -1) -> str:
        """Return `text.replace(old, new, count)`."""
        found = text.count(old) if count < 0 else min(text.count(old), count)
        self.spend(len(text) + found * max(len(new) - len(old), 0))
        return text.replace(old, new, count)


def whole(text: str, largest: int = 10**18) -> int | None:
    """Return the number that the digits 0 to 9 state; None for other texts and for larger numbers."""
    is_number = text.isascii() and text.isdecimal() and len(text) <= 30
    return int(text) if is_number and int(text) <= largest else None


def text_of_file(path: Path, most: int = LARGEST_FILE, errors: str = "strict") -> str:
    """Return the text of a recipe, or of a file that belongs to it. Raises ShellError, OSError and
    UnicodeDecodeError.
    """
    text = (
        read_regular(path, ShellError, most)
        .decode("utf-8-sig", errors)
        .replace("\r\n", "\n")
    )
    # Only the reader marks values as open.
    return text.replace(OPEN, "").replace(CLOSE, "")
