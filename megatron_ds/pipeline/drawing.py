"""A schedule as text, one line per rank, one column per unit of time.

    rank 0 | F0 F1 F2 .. B0 -- .. B1 -- .. B2 --
    rank 1 | .. F0 F1 B0 -- F2 B1 -- .. B2 --         "--" continues, ".." is idle, F0' is the second chunk of a rank
"""

from .passes import COMPUTE
from .simulate import Simulation


def draw(simulation: Simulation, unit: float | None = None) -> str:
    """`unit` is the time that one column stands for; by default, that of the shortest computation."""
    lengths = [end - start for rank in zip(simulation.schedule, simulation.starts, simulation.ends)
               for i, start, end in zip(*rank) if i.op in COMPUTE and end > start]
    unit = unit or min(lengths, default=1)
    rows = [_row(*rank, unit) for rank in zip(simulation.schedule, simulation.starts, simulation.ends)]
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
