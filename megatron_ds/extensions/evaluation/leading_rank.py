"""Work of rank 0 that needs scores, which all ranks compute.

A benchmark reads files and prepares requests in an order of its own. It runs on rank 0 alone, and each time
that it asks for scores, all ranks compute them.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

from ...mpu.agree import on_one_rank
from ...mpu.collectives import all_gather_object
from .score_plan import ScoreRequest
from .scorer import Scored, Scorer

T = TypeVar("T")
Score = Callable[[Sequence[ScoreRequest]], list[Scored]]


def lead(scorer: Scorer, work: Callable[[Score], T]) -> T:
    """`work(score)` of rank 0, whose result or error all ranks have. Collective over the world.

    work   called on rank 0 alone; must not communicate but through `score`
    score  takes requests, and returns the scores of each
    """
    world = scorer.world

    def ask(requests: Sequence[ScoreRequest]) -> list[Scored]:
        scorer.check(requests)
        all_gather_object(list(requests), world)
        return scorer.score(requests)

    def working() -> T:
        try:
            return work(ask)
        finally:
            all_gather_object(None, world)

    if world.rank > 0:
        while (requests := all_gather_object(None, world)[0]) is not None:
            scorer.score(requests)
    return on_one_rank(world, working)
