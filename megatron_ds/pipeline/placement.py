"""Which pipeline rank holds which stage. It follows from the schedule: a stage lives where the schedule computes it.

    1f1b, interleaved, …   round robin        p = 3, chunks = 2        rank 0: 0 3    rank 1: 1 4    rank 2: 2 5
    zb-v                   there and back                              rank 0: 0 5    rank 1: 1 4    rank 2: 2 3
"""

from functools import cache

from .passes import stage_ranks
from .schedules import SCHEDULES


@cache
def placement(name: str, pipeline_size: int, chunks: int) -> tuple[int, ...]:
    """Global stage → pipeline rank, for the pipeline_size * chunks stages of schedule `name`."""
    homes = stage_ranks(SCHEDULES[name](pipeline_size, 1, chunks))
    return tuple(homes[stage] for stage in sorted(homes))


def stages_of(rank: int, placement: tuple[int, ...]) -> tuple[int, ...]:
    """The stages on a pipeline rank, in the order of the model."""
    return tuple(stage for stage, home in enumerate(placement) if home == rank)
