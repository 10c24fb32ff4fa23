"""ZB-H1 and ZB-H2: weight halves of backward are delayed and fill idle time. Qi et al. 2024
(arXiv:2401.10241), section 2.

A neighbour waits only for the gradient of its output, I. The gradient of the weights, W, may come at any
later time.

    ZB-H1    as many forwards ahead as 1F1B        bubble (p - 1) (F + I - W), a third of 1F1B's if F = I = W;
                                                              every rank keeps min(m, p) micro-batches alive
    ZB-H2    nearly twice as many                             bubble (p - 1) (F + I - 2 W), none if F = I = W;
                                                              every rank keeps min(m, 2 p - 1) micro-batches
                                                              alive

Rank r has `ahead` forwards more than I, and `behind` I more than W; the sum is the number of micro-batches it
keeps alive. A late rank uses the memory that it does not need for forwards to delay W. ZB-H2 with m < 2 p - 1
is a schedule between the two.
"""

from ..instruction import Instruction, Op, Program, Schedule
from .family import schedule


@schedule("zb-h1", peak=lambda p, m, v, rank: min(m, p))
def zb_h1(pipeline_size: int, num_microbatches: int, chunks: int = 1) -> Schedule:
    """As many micro-batches alive as 1F1B keeps on rank 0, on every rank."""
    return _schedule(pipeline_size, num_microbatches, more=0)


@schedule("zb-h2", peak=lambda p, m, v, rank: min(m, 2 * p - 1))
def zb_h2(pipeline_size: int, num_microbatches: int, chunks: int = 1) -> Schedule:
    """Nearly twice as many micro-batches alive, and no bubble if F = I = W."""
    more = max(0, min(pipeline_size - 1, num_microbatches - pipeline_size))
    return _schedule(pipeline_size, num_microbatches, more)


def _schedule(p: int, m: int, more: int) -> Schedule:
    """more: micro-batches alive beyond those of 1F1B, from 0 to p - 1."""
    programs = []
    for rank in range(p):
        ahead = p - rank + more * (p - 1 - rank) // max(1, p - 1)
        programs.append(_program(rank, m, ahead, behind=p + more - ahead))
    return tuple(programs)


def _program(stage: int, m: int, ahead: int, behind: int) -> Program:
    """`ahead` forwards, then I, W, F in turn; the first `behind` weight halves are left to the end."""
    program = [Instruction(Op.F, stage, k) for k in range(min(m, ahead))]
    for k in range(m):
        program.append(Instruction(Op.I, stage, k))
        if k >= behind:
            program.append(Instruction(Op.W, stage, k - behind))
        if k + ahead < m:
            program.append(Instruction(Op.F, stage, k + ahead))
    program += [Instruction(Op.W, stage, k) for k in range(max(0, m - behind), m)]
    return tuple(program)
