"""How good an order is for given costs: what schedules that look for one compare."""

from ..clock import run_clocks
from ..costs import StageCosts
from ..instruction import Op, Schedule
from ..passes import add_transfers

ALIKE = StageCosts()


def judge(order: Schedule, num_stages: int, costs: StageCosts) -> tuple[float, float]:
    """(longest time from first to last computation of a rank, of all ranks together); less is better."""
    lowered = add_transfers(order, num_stages)
    starts, ends = run_clocks(lowered, costs.of)
    first = [next(start for i, start in zip(program, its) if i.op is Op.F) for program, its in zip(lowered, starts)]
    last = [its[-1] for its in ends]
    return max(end - begin for begin, end in zip(first, last)), max(last)
