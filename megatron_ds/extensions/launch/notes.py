"""`note`: what the launcher itself prints."""

import os
import sys
import textwrap

INDENT = 4  # of a line's continuation


def note(text: str, kept: str = "") -> None:
    """Print a text. On a terminal its lines are broken between words, but for those of `kept`, which a rank wrote."""
    sys.stdout.flush()
    lines = f"megatron-ds launch: {text}".split("\n")
    if width := _width():
        written = set(kept.split("\n"))
        lines = [line if line in written else _broken(line, width) for line in lines]
    print(*lines, sep="\n", file=sys.stderr, flush=True)


def _width() -> int:
    """Return the columns of the terminal; 0 for a file or a pipe, and a terminal that does not tell."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns
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
