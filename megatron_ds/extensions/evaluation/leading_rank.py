"""Work of rank 0 that needs scores and texts, which all ranks compute.

A benchmark reads files and prepares requests in an order of its own. It runs on rank 0 alone, and each time
that it asks for scores or texts, all ranks compute them.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

from ...mpu.agree import on_one_rank
from ...mpu.collectives import all_gather_object
from ..generation.generator import Generator
from .score_plan import ScoreRequest
from .scorer import Scored, Scorer

T = TypeVar("T")
TEXTS = "texts"  # announces a generator in place of requests


class Score:
    """What rank 0 may ask of all ranks: call it with requests for the scores of each."""

    def __init__(self, scorer: Scorer):
        self._scorer = scorer

    def __call__(self, requests: Sequence[ScoreRequest]) -> list[Scored]:
        self._scorer.check(requests)
        all_gather_object(list(requests), self._scorer.world)
        return self._scorer.score(requests)

    @property
    def generates(self) -> bool:
        """Whether the layout has a generator: under context parallelism no rank keeps whole texts."""
        return self._scorer.replica.mesh.size("cp") == 1

    def with_generator(self, work: Callable[[Generator], T]) -> T:
        """Return `work(generator)`; all ranks take part in the steps of the generator."""
        all_gather_object(TEXTS, self._scorer.world)
        generator = Generator(self._scorer.replica)
        try:
            return work(generator)
        finally:
            generator.close()


def lead(scorer: Scorer, work: Callable[[Score], T]) -> T:
    """Run `work(score)` on rank 0; all ranks return its result or raise its error. Collective over the world.

    work: called on rank 0 alone; it may communicate only through `score`
    """
    world = scorer.world

    def working() -> T:
        try:
            return work(Score(scorer))
        finally:
            all_gather_object(None, world)

    if world.rank > 0:
        while (asked := all_gather_object(None, world)[0]) is not None:
            if asked == TEXTS:
                Generator(scorer.replica).follow()
            else:
                scorer.score(asked)
    return on_one_rank(world, working)
