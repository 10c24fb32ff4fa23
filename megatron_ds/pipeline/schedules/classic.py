"""Schedules with a whole backward: GPipe, 1F1B and interleaved 1F1B.

GPipe (Huang et al. 2019, arXiv:1811.06965, figure 2c) runs all forwards, then all backwards:

    rank 0 | F0 F1 F2 .. .. .. B0 -- B1 -- B2 --         bubble (p - 1) / (m + p - 1); every rank
    rank 1 | .. F0 F1 F2 B0 -- B1 -- B2 --               keeps all m micro-batches alive

The paper runs the backwards in reverse order. Here they run in the order of the micro-batches, so that
gradients are summed in the same order as in one process and under every other schedule; span and peak memory
are the same.

1F1B (Narayanan et al. 2021, arXiv:2104.04473, section 2.2.1) alternates one forward and one backward once the
pipeline is full. The bubble is that of GPipe, but rank r keeps only min(m, p - r) micro-batches alive:

    rank 0 | F0 F1 F2 .. .. .. .. B0 -- F3 B1 -- .. B2 -- .. B3 --   p = 3, m = 4; warm-up of 2, 1, 0 forwards
    rank 1 | .. F0 F1 .. .. B0 -- F2 B1 -- F3 B2 -- .. B3 --
    rank 2 | .. .. F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 --

Interleaved 1F1B (same paper, section 2.2.2) gives each rank v thin stages, which shortens the bubble:

    rank 0 | F0  F1  F0' F1' ... B0' --- ...     bubble (p - 1) / (v m + p - 1) for m ≥ p;
    rank 1 | ... F0  F1  F0' B0' --- F1' …       rank r keeps up to 2 (p - r - 1) + (v - 1) n + 1 alive

Micro-batches pass a rank in groups of n: the first chunk of each micro-batch of the group, then the second
chunk of each, and so on. A group of p or more is back at rank 0, one chunk further, when rank 0 is ready for
it; a smaller one makes the rank wait. The paper uses groups of exactly p, and so requires m to be a multiple
of p. Here m micro-batches make ⌊m / p⌋ groups, as even as possible, which costs no time and up to (v - 1) ⌈p
/ ⌊m / p⌋⌉ more live activations.

Note: when a group larger than p is useful. If a transfer takes time c, a group of p returns p c after rank 0
is ready for it, at each of the v - 1 changes of the chunk while the pipeline fills, and again while it
drains: ranks wait for 2 (p v - 1) transfers. A group of p + x is x computations longer; if these take p c or
more, ranks wait only for the 2 (p - 1) transfers that every schedule waits for on the way to the last rank
and back. Each additional micro-batch in a group keeps v - 1 more thin stages alive.
"""

from itertools import accumulate

from ...errors import ScheduleError
from ..instruction import Instruction, Op, Program, Schedule
from . import schedule


@schedule("gpipe", peak=lambda p, m, v, rank: m)
def gpipe(pipeline_size: int, num_microbatches: int, chunks: int = 1) -> Schedule:
    """All forwards, then all backwards."""
    microbatches = range(num_microbatches)
    return tuple(
        tuple(Instruction(op, rank, k) for op in (Op.F, Op.B) for k in microbatches)
        for rank in range(pipeline_size)
    )


def interleaved_peak(
    p: int, m: int, v: int, rank: int, group_size: int | None = None
) -> int:
    """Thin stages that `rank` keeps alive at most."""
    ahead = (2 if v > 1 else 1) * (p - rank - 1)
    return min(v * m, ahead + (v - 1) * len(_groups(m, group_size or p)[0]) + 1)


@schedule(
    "interleaved",
    "interleaved_1f1b",
    chunks=None,
    peak=interleaved_peak,
    options=("group_size",),
)
def interleaved(
    pipeline_size: int,
    num_microbatches: int,
    chunks: int = 1,
    *,
    group_size: int | None = None,
) -> Schedule:
    """1F1B over `chunks` stages per rank. group_size: the fewest micro-batches of a group; None: p."""
    size = pipeline_size if group_size is None else group_size
    if size < pipeline_size:
        raise ScheduleError(
            f"schedule 'interleaved' cannot use groups of {size} micro-batches on "
            f"{pipeline_size} pipeline ranks: rank 0 would wait for each group to return. "
            f"Use {pipeline_size} or more."
        )
    groups = _groups(num_microbatches, size)
    return tuple(
        _interleaved_program(rank, pipeline_size, chunks, groups)
        for rank in range(pipeline_size)
    )


@schedule("1f1b", "one_f_one_b", peak=lambda p, m, v, rank: min(m, p - rank))
def one_f_one_b(pipeline_size: int, num_microbatches: int, chunks: int = 1) -> Schedule:
    """One forward and one backward in turn, after a warm-up of p - rank - 1 forwards."""
    groups = [range(num_microbatches)]
    return tuple(
        _interleaved_program(rank, pipeline_size, 1, groups)
        for rank in range(pipeline_size)
    )


def _groups(m: int, size: int) -> list[range]:
    """Micro-batches 0 to m - 1 in ⌊m / size⌋ groups (at least one), the longer ones first."""
    number = max(1, m // size)
    sizes = [m // number + (i < m % number) for i in range(number)]
    ends = list(accumulate(sizes))
    return [range(end - size, end) for size, end in zip(sizes, ends)]


def _interleaved_program(rank: int, p: int, v: int, groups: list[range]) -> Program:
    forward = []
    backward = []
    for group in groups:
        for c in range(v):
            forward += [Instruction(Op.F, c * p + rank, k) for k in group]
        for c in reversed(range(v)):
            backward += [Instruction(Op.B, c * p + rank, k) for k in group]
    ahead = (2 if v > 1 else 1) * (p - rank - 1)
    # The first backward is of the last chunk, after all earlier chunks of the first group. With several
    # chunks, a forward and a backward of neighbouring ranks alternate, which takes two forwards for each
    # later rank.
    warmup = min(len(forward), ahead + (v - 1) * len(groups[0]))
    steady = (i for pair in zip(forward[warmup:], backward) for i in pair)
    return (*forward[:warmup], *steady, *backward[len(forward) - warmup :])
