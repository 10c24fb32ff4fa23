"""GPipe: all forwards, then all backwards. Huang et al. 2019 (arXiv:1811.06965), figure 2c.

    rank 0 | F0 F1 F2 .. .. .. B0 -- B1 -- B2 --         bubble (p - 1) / (m + p - 1); every rank
    rank 1 | .. F0 F1 F2 B0 -- B1 -- B2 --               keeps all m micro-batches alive

The paper runs the backwards in reverse order. Here they run in the order of the micro-batches, so that gradients are
summed in the same order as in one process (and under every other schedule); span and peak memory are the same.
"""

from ..instruction import Instruction, Op, Schedule
from .shape import schedule


@schedule("gpipe", peak=lambda p, m, v, rank: m)
def gpipe(pipeline_size: int, num_microbatches: int, chunks: int = 1) -> Schedule:
    return tuple(tuple(Instruction(op, rank, k) for op in (Op.F, Op.B) for k in range(num_microbatches))
                 for rank in range(pipeline_size))
