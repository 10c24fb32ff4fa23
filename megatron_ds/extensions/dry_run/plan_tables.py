"""Tables and numbers in the text of a dry run."""

from collections.abc import Sequence

UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
# prefixes of powers of 1000, the largest first
LARGE = (
    (1e18, "E"),
    (1e15, "P"),
    (1e12, "T"),
    (1e9, "G"),
    (1e6, "M"),
    (1e3, "k"),
)


def table(
    rows: Sequence[Sequence[str]],
    left: int = 1,
    indent: str = "  ",
    last_left: bool = False,
) -> list[str]:
    """Return rows of cells as lines. The first `left` columns, and the last if wanted, are flush left, others right."""
    # A column is as wide as its widest cell.
    columns = max(map(len, rows))
    widths = [0] * columns
    for row in rows:
        for i, cell in enumerate(row):
            widths[i] = max(widths[i], len(cell))
    flush_left = set(range(left))
    if last_left:
        flush_left.add(columns - 1)
    # Each row is filled with blanks.
    lines = []
    for row in rows:
        cells = []
        for i, cell in enumerate(row):
            width = widths[i]
            if i in flush_left:
                cells.append(cell.ljust(width))
            else:
                cells.append(cell.rjust(width))
        line = indent + "  ".join(cells)
        lines.append(line.rstrip())
    return lines


def in_bytes(count: float) -> str:
    """Four digits and a unit: 1.234 MiB, 12.34 MiB, 123.4 MiB."""
    unit = 0
    while count >= 1023.95 and unit < len(UNITS) - 1:
        count = count / 1024
        unit = unit + 1
    # A number of bytes has no decimals.
    if unit == 0:
        return f"{count:,.0f} {UNITS[0]}"
    return f"{_four_digits(count)} {UNITS[unit]}"


def in_large(count: float, unit: str = "") -> str:
    """Four digits and a prefix of powers of 1000: 1.008 T, 12.30 G."""
    for size, letter in LARGE:
        if count >= size:
            return f"{_four_digits(count / size)} {letter}{unit}"
    return f"{count:,.0f} {unit}".rstrip()


def _four_digits(number: float) -> str:
    """Return the number with as many decimals as make four digits."""
    before_point = len(str(int(number)))
    decimals = max(4 - before_point, 0)
    return f"{number:.{decimals}f}"


def in_short(lines: Sequence[str], most: int) -> list[str]:
    """Return about `most` lines at most: a line of dots replaces those in the middle."""
    if len(lines) <= most + 1:
        return list(lines)
    head = (most + 1) // 2
    tail = most - head
    first_of_tail = len(lines) - tail
    return [*lines[:head], "  …", *lines[first_of_tail:]]
