"""1F1B: once the pipeline is full, one forward, one backward. Narayanan et al. 2021 (arXiv:2104.04473), section 2.2.1.

    rank 0 | F0 F1 F2 .. .. .. .. B0 -- F3 B1 -- .. B2 -- .. B3 --        p = 3, m = 4; warm-up of 2, 1, 0 forwards
    rank 1 | .. F0 F1 .. .. B0 -- F2 B1 -- F3 B2 -- .. B3 --
    rank 2 | .. .. F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 --

Same bubble as GPipe, (p - 1) / (m + p - 1), but rank r keeps only min(m, p - r) micro-batches alive.
"""

from ..instruction import Instruction, Op, Program, Schedule
from .shape import schedule


@schedule("1f1b", "one_f_one_b", peak=lambda p, m, v, rank: min(m, p - rank))
def one_f_one_b(pipeline_size: int, num_microbatches: int, chunks: int = 1) -> Schedule:
    return tuple(_program(rank, pipeline_size, num_microbatches) for rank in range(pipeline_size))


def _program(rank: int, p: int, m: int) -> Program:
    forward = [Instruction(Op.F, rank, k) for k in range(m)]
    backward = [Instruction(Op.B, rank, k) for k in range(m)]
    warmup = min(m, p - rank - 1)
    steady = (i for pair in zip(forward[warmup:], backward) for i in pair)
    return (*forward[:warmup], *steady, *backward[m - warmup:])
