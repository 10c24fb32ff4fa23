"""The bubble rate of Qi et al. 2024 (arXiv:2401.10241), tables 5 and 6."""

from megatron_ds.pipeline.simulate import Simulation


def rank_bubble(simulation: Simulation) -> float:
    """Fraction of the longest of `rank_spans` that exceeds the computing time of the busiest rank.

    It leaves out that a late rank starts later than the first, which costs nothing only if ranks begin the next step
    as they finish this one; `Simulation.bubble` counts it.
    """
    longest = max(simulation.rank_spans, default=0)
    return 1 - max(simulation.busy) / longest if longest else 0.0
