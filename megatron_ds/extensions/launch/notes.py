"""`note`: what the launcher itself prints, in lines that fit the terminal."""

import os
import sys
import textwrap
from typing import TextIO

INDENT = 4  # of a line's continuation


def note(text: str, kept: str = "") -> None:
    """Print a text of the launcher, fitted to the terminal. kept: lines that a rank wrote, which stay as they are"""
    sys.stdout.flush()
    fitted_text = fitted(f"megatron-ds launch: {text}", sys.stderr, kept)
    print(fitted_text, file=sys.stderr, flush=True)


def fitted(text: str, stream: TextIO, kept: str = "") -> str:
    """Return a text with its lines broken between words where the terminal of a stream is too narrow for them.

    Nothing is changed for a file or a pipe. kept: lines that stay as they are
    """
    width = _width(stream)
    written = set(kept.split("\n"))
    lines = text.split("\n")
    if width:
        lines = [line if line in written else _broken(line, width) for line in lines]
    return "\n".join(lines)


def _width(stream: TextIO) -> int:
    """Return the columns of a terminal; 0 for a file, a pipe, or a terminal without a size."""
    try:
        return os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        return 0


def _broken(line: str, width: int) -> str:
    """Return a line as several where it has to be. Paths and commands stay whole."""
    start = len(line) - len(line.lstrip()) + INDENT
    return textwrap.fill(
        line,
        width,
        subsequent_indent=" " * start,
        break_long_words=False,
        break_on_hyphens=False,
    )
