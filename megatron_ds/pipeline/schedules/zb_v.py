"""ZB-V: a rank holds a stage near the start of the model and one near its end, so that gradients are soon back. Qi et al. 2024
(arXiv:2401.10241), section 6.

    stage s < p lives on rank s, stage p + s on rank p - 1 - s: the model goes down the ranks and up again

The loss is on rank 0. Each rank keeps at most 2 p activations of half a rank's model alive, as much as 1F1B keeps on rank 0,
and hardly ever waits between its first and its last computation if F = I = W.

The order is found by a greedy rule in steps of one unit: a rank takes, of what is ready, the computation that stands first
here: F of its later stage, F of its earlier one, I of its earlier one, I of its later one, W of either. An F must find room;
the earlier stage leaves room for one F of the later one, which can therefore always go on. (This is the best of the 24 orders
of these four: up to 16 ranks, with m a multiple of p, it takes at most 6 units more than the least, p - 1 + 6 m.)
"""

from ..instruction import Instruction, Op, Schedule
from .shape import schedule


@schedule("zb-v", chunks=(2,), peak=lambda p, m, v, rank: min(2 * m, 2 * p))
def zb_v(pipeline_size: int, num_microbatches: int, chunks: int = 2) -> Schedule:
    p, m = pipeline_size, num_microbatches
    ended: dict[tuple[Op, int], list[int]] = {(op, s): [] for op in (Op.F, Op.I, Op.W) for s in range(2 * p)}
    programs: list[list[Instruction]] = [[] for _ in range(p)]
    now, left = 0, 6 * p * m
    while left:
        for rank in range(p):
            choice = _choose(ended, rank, p, m, now)
            if choice is not None:
                programs[rank].append(Instruction(*choice, len(ended[choice])))
                ended[choice].append(now + 1)
                left -= 1
        now += 1
    return tuple(map(tuple, programs))


def _choose(ended, rank: int, p: int, m: int, now: int) -> tuple[Op, int] | None:
    """What a rank does next, as (op, stage), or None if it has to wait."""
    early, late = rank, 2 * p - 1 - rank
    live = sum(len(ended[Op.F, s]) - len(ended[Op.W, s]) for s in (early, late))
    for stage, room in ((late, 2 * p), (early, 2 * p - 1)):
        if live < room and _ready(ended, Op.F, stage, p, m, now):
            return Op.F, stage
    for stage in (early, late):
        if _ready(ended, Op.I, stage, p, m, now):
            return Op.I, stage
    waiting = [s for s in (late, early) if _ready(ended, Op.W, s, p, m, now)]
    return (Op.W, min(waiting, key=lambda s: len(ended[Op.W, s]))) if waiting else None


def _ready(ended, op: Op, stage: int, p: int, m: int, now: int) -> bool:
    """Is what the next micro-batch of this operation at this stage needs there?"""
    k = len(ended[op, stage])
    if k == m:
        return False
    there = lambda op, stage: len(times := ended[op, stage]) > k and times[k] <= now
    if op is Op.F:
        return stage == 0 or there(Op.F, stage - 1)
    if op is Op.W:
        return there(Op.I, stage)
    return there(Op.F, stage) and (stage == 2 * p - 1 or there(Op.I, stage + 1))
