"""Text that people read: aligned tables, bytes and counts with units, long rows of numbers in short."""

from collections.abc import Sequence

UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
LARGE = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def table(rows: Sequence[Sequence[str]], left: int = 1, indent: str = "  ") -> list[str]:
    """Rows of cells as lines; the first `left` columns are flush left, numbers flush right."""
    columns = max(len(row) for row in rows)
    widths = [max(len(row[i]) for row in rows if i < len(row)) for i in range(columns)]
    align = lambda i, cell: cell.ljust(widths[i]) if i < left else cell.rjust(widths[i])
    return [(indent + "  ".join(align(i, cell) for i, cell in enumerate(row))).rstrip() for row in rows]


def in_bytes(count: float) -> str:
    """Four digits and a unit: 1.234 MiB, 12.34 MiB, 123.4 MiB."""
    unit = 0
    while count >= 1023.95 and unit < len(UNITS) - 1:
        count, unit = count / 1024, unit + 1
    return f"{_digits(count, 4) if unit else f'{count:,.0f}'} {UNITS[unit]}"


def in_large(count: float, unit: str = "") -> str:
    """1.008 T, 12.3 G."""
    for size, letter in LARGE:
        if count >= size:
            return f"{_digits(count / size, 4)} {letter}{unit}"
    return f"{count:,.0f} {unit}".rstrip()


def _digits(number: float, digits: int) -> str:
    whole = len(str(int(number)))
    return f"{number:.{max(digits - whole, 0)}f}"


def ranks_in_short(ranks: Sequence[int]) -> str:
    """(0, 1, 2, 3) → 0–3;  (0, 48, 96, 144) → 0, 48, … 144;  others are written out, long ones cut."""
    if len(ranks) <= 2:
        return ", ".join(map(str, ranks))
    step = ranks[1] - ranks[0]
    if any(b - a != step for a, b in zip(ranks, ranks[1:])):
        return ", ".join(map(str, ranks)) if len(ranks) <= 8 else f"{', '.join(map(str, ranks[:4]))}, … {ranks[-1]}"
    return f"{ranks[0]}–{ranks[-1]}" if step == 1 else f"{ranks[0]}, {ranks[1]}, … {ranks[-1]}"


def in_short(rows: Sequence[Sequence[str]], most: int) -> list[Sequence[str]]:
    """At most about `most` rows, those in the middle left out for a row that says so."""
    if len(rows) <= most + 1:
        return list(rows)
    head = (most + 1) // 2
    return [*rows[:head], ["…"], *rows[len(rows) - most + head:]]
