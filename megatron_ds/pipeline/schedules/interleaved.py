"""Interleaved 1F1B: a rank holds several thin stages, which shortens the bubble. Narayanan et al. 2021 (arXiv:2104.04473),
section 2.2.2.

    rank 0 | F0  F1  F0' F1' ... B0' --- ...                 bubble (p - 1) / (v m + p - 1) for v chunks per rank and m ≥ p;
    rank 1 | ... F0  F1  F0' B0' --- F1' …                   rank r keeps up to 2 (p - r - 1) + (v - 1) n + 1 thin stages alive

Micro-batches pass a rank in groups of n: the first chunk of each of the group, the second chunk of each, and so on. A group
of p or more is back at rank 0, one chunk further, when rank 0 is through with it; a smaller one lets the rank wait. The paper
takes groups of exactly p and so needs a multiple of p micro-batches. Here m micro-batches make ⌊m / p⌋ groups, as even as
possible, which costs no time and up to (v - 1) ⌈p / ⌊m / p⌋⌉ more live activations.

Note: what a group larger than p is good for. Where transfers take time c, a group of p comes round p c after rank 0 is through
with it, at each of the v - 1 changes of the chunk while the pipeline fills, and again while it drains: of the transfers
2 (p v - 1) are waited for. A group of p + x is x computations longer; if these take p c or more, only the 2 (p - 1) are left
that any schedule waits for on the way to the last rank and back. Each more in a group is v - 1 more thin stages alive.
"""

from itertools import accumulate

from ...errors import ScheduleError
from ..instruction import Instruction, Op, Program, Schedule
from .shape import schedule


def most_alive(p: int, m: int, v: int, rank: int, group_size: int | None = None) -> int:
    ahead = (2 if v > 1 else 1) * (p - rank - 1)
    return min(v * m, ahead + (v - 1) * len(_groups(m, group_size or p)[0]) + 1)


@schedule("interleaved", "interleaved_1f1b", chunks=None, peak=most_alive, options=("group_size",))
def interleaved(pipeline_size: int, num_microbatches: int, chunks: int = 1, *, group_size: int | None = None) -> Schedule:
    """group_size: the fewest micro-batches of a group, if there are as many; None: pipeline_size"""
    size = pipeline_size if group_size is None else group_size
    if size < pipeline_size:
        raise ScheduleError(f"schedule 'interleaved' cannot use groups of {size} micro-batches on {pipeline_size} pipeline "
                            f"ranks: rank 0 would wait for each group to return. Use {pipeline_size} or more.")
    groups = _groups(num_microbatches, size)
    return tuple(_program(rank, pipeline_size, chunks, groups) for rank in range(pipeline_size))


def _groups(m: int, size: int) -> list[range]:
    """Micro-batches 0 to m - 1 in ⌊m / size⌋ groups (one at least), the longer ones first."""
    number = max(1, m // size)
    sizes = [m // number + (i < m % number) for i in range(number)]
    ends = list(accumulate(sizes))
    return [range(end - size, end) for size, end in zip(sizes, ends)]


def _program(rank: int, p: int, v: int, groups: list[range]) -> Program:
    forward = [Instruction(Op.F, c * p + rank, k) for group in groups for c in range(v) for k in group]
    backward = [Instruction(Op.B, c * p + rank, k) for group in groups for c in reversed(range(v)) for k in group]
    ahead = (2 if v > 1 else 1) * (p - rank - 1)
    # The first backward is of the last chunk: all earlier chunks of the first group come first. If there are several chunks,
    # a forward and a backward of neighbouring ranks take turns, which takes two forwards per rank behind this one.
    warmup = min(len(forward), ahead + (v - 1) * len(groups[0]))
    steady = (i for pair in zip(forward[warmup:], backward) for i in pair)
    return (*forward[:warmup], *steady, *backward[len(forward) - warmup:])
