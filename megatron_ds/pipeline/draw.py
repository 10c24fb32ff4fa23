"""Schedules as text."""

from .instruction import Schedule
from .passes import COMPUTE
from .simulate import Simulation, simulate


def draw(schedule: Schedule | Simulation, unit: float | None = None) -> str:
    """The schedule as text, one line per rank, one column per `unit` of time (default: the shortest computation).

        rank 0 | F0 F1 .. .. B0 -- .. B1 --
        rank 1 | .. F0 B0 -- F1 B1 --               "--" continues, ".." is idle, F0' is of the rank's second stage
    """
    s = schedule if isinstance(schedule, Simulation) else simulate(schedule)
    ranks = list(zip(s.schedule, s.starts, s.ends))
    if unit is None:
        lengths = (end - start for rank in ranks for i, start, end in zip(*rank) if i.op in COMPUTE)
        unit = min((length for length in lengths if length > 0), default=1)
    rows = [_row(*rank, unit) for rank in ranks]
    width = max((len(cell) for row in rows for cell in row), default=1)
    digits = len(str(len(rows) - 1))
    return "\n".join(f"rank {rank:>{digits}} | " + " ".join(_cell(cell, width) for cell in row).rstrip()
                     for rank, row in enumerate(rows))


def _row(program, starts, ends, unit: float) -> list[str]:
    stages = sorted({i.stage for i in program})
    row: list[str] = []
    for i, start, end in zip(program, starts, ends):
        if i.op in COMPUTE:
            first, stop = round(start / unit), max(round(end / unit), round(start / unit) + 1)
            row += ["."] * (first - len(row))
            row.append(f"{i.op}{i.microbatch}" + "'" * stages.index(i.stage))
            row += ["-"] * (stop - first - 1)
    return row


def _cell(text: str, width: int) -> str:
    return text * width if text in (".", "-") else text.ljust(width)
