"""Tables and numbers in the text of a dry run."""

from collections.abc import Sequence

UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
LARGE = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def table(
    rows: Sequence[Sequence[str]],
    left: int = 1,
    indent: str = "  ",
    last_left: bool = False,
) -> list[str]:
    """Rows of cells as lines; the first `left` columns, and maybe the last, are flush left, others right."""
    columns = max(len(row) for row in rows)
    widths = [max(len(row[i]) for row in rows if i < len(row)) for i in range(columns)]
    is_left = lambda i: i < left or last_left and i == columns - 1
    align = lambda i, cell: (
        cell.ljust(widths[i]) if is_left(i) else cell.rjust(widths[i])
    )
    return [
        (indent + "  ".join(align(i, cell) for i, cell in enumerate(row))).rstrip()
        for row in rows
    ]


def in_bytes(count: float) -> str:
    """Four digits and a unit: 1.234 MiB, 12.34 MiB, 123.4 MiB."""
    unit = 0
    while count >= 1023.95 and unit < len(UNITS) - 1:
        count = count / 1024
        unit = unit + 1
    return f"{_four_digits(count) if unit else f'{count:,.0f}'} {UNITS[unit]}"


def in_large(count: float, unit: str = "") -> str:
    """Four digits and a prefix of powers of 1000: 1.008 T, 12.30 G."""
    for size, letter in LARGE:
        if count >= size:
            return f"{_four_digits(count / size)} {letter}{unit}"
    return f"{count:,.0f} {unit}".rstrip()


def _four_digits(number: float) -> str:
    return f"{number:.{max(4 - len(str(int(number))), 0)}f}"


def in_short(lines: Sequence[str], most: int) -> list[str]:
    """About `most` lines at most: a line of dots stands for those in the middle."""
    if len(lines) <= most + 1:
        return list(lines)
    head = (most + 1) // 2
    return [*lines[:head], "  …", *lines[len(lines) - most + head :]]
