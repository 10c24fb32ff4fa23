"""Schedules by name: each a pure function (pipeline_size, num_microbatches, chunks) → `Schedule` of F, B, I
and W. `ScheduleFamily` is such a function with its limits, and `SCHEDULES` the table of families.

A schedule is the order in which each rank computes; `pipeline.passes` adds the transfers and reductions that
follow from it. A new schedule is one file with such a function under `@schedule(name)`, which a
feature names in `registers`. `tests/contracts` runs each schedule through the passes and the simulator for
many shapes.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache, lru_cache

from ...errors import ScheduleError
from ...registry import Registry
from ..instruction import Schedule, stage_ranks

# (pipeline_size, num_microbatches, chunks, **options).
MakeSchedule = Callable[..., Schedule]
# (pipeline_size, num_microbatches, chunks, rank) → activations.
Peak = Callable[[int, int, int, int], int]
REMEMBERED = 8  # orders of a family: those of training and of evaluation


@dataclass(frozen=True)
class ScheduleFamily:
    """A registered schedule. Called with sizes, it returns the order for them; the last few are remembered.

    make     the function that computes an order
    chunks   numbers of model chunks per rank that it supports; None: any
    peak     most activations (of one micro-batch at one stage) that a rank keeps alive; None: known from
             simulation only. Tests compare it with the simulator
    options  keyword arguments that `make` takes, of `costs` (a StageCosts), `memory_limit` and `group_size`
    """

    name: str
    make: MakeSchedule
    chunks: Collection[int] | None = (1,)
    peak: Peak | None = None
    options: tuple[str, ...] = ()

    def __call__(
        self,
        pipeline_size: int,
        num_microbatches: int,
        chunks: int | None = None,
        **options,
    ) -> Schedule:
        """Make the schedule. Raises ScheduleError for unsupported sizes. chunks: None for the fewest."""
        chunks = self.default_chunks if chunks is None else chunks
        self.check(pipeline_size, num_microbatches, chunks)
        return self.make(pipeline_size, num_microbatches, chunks, **options)

    @property
    def default_chunks(self) -> int:
        """The fewest chunks per rank that the schedule supports."""
        return 1 if self.chunks is None else min(self.chunks)

    def supports(self, chunks: int) -> bool:
        """Return whether there is an order for that many chunks per rank."""
        return chunks >= 1 if self.chunks is None else chunks in self.chunks

    def check(self, pipeline_size: int, num_microbatches: int, chunks: int) -> None:
        """Raise ScheduleError, with the sizes and the schedules that are valid instead."""
        if pipeline_size < 1:
            raise ScheduleError(
                f"schedule {self.name!r} cannot run on {pipeline_size} pipeline ranks: "
                "at least one rank has to compute. Use a pipeline size of 1 or more."
            )
        if num_microbatches < 1:
            raise ScheduleError(
                f"schedule {self.name!r} cannot run {num_microbatches} micro-batches: a step "
                "needs at least one. Use any number from 1 up (global batch / micro-batch / "
                "data-parallel size); every schedule accepts all of them."
            )
        if not self.supports(chunks):
            counts = self.chunks or ("any number from 1 up",)
            valid = ", ".join(map(str, sorted(counts)))
            able = [name for name in SCHEDULES if SCHEDULES[name].supports(chunks)]
            raise ScheduleError(
                f"schedule {self.name!r} does not support {chunks} chunks of the model per "
                f"rank. Valid: {valid}. Schedules for {chunks} chunks: "
                f"{', '.join(able) or 'none, use 1 or more'}."
            )


SCHEDULES: Registry[ScheduleFamily] = Registry("pipeline schedule")


def schedule(
    name: str,
    *aliases: str,
    chunks: Collection[int] | None = (1,),
    peak: Peak | None = None,
    options: Collection[str] = (),
) -> Callable[[MakeSchedule], ScheduleFamily]:
    """Decorator that registers a function as a `ScheduleFamily`; parameters are its fields."""

    def register(make: MakeSchedule) -> ScheduleFamily:
        family = ScheduleFamily(
            name, lru_cache(REMEMBERED)(make), chunks, peak, tuple(options)
        )
        return SCHEDULES.register(name, *aliases)(family)

    return register


@cache
def placement(name: str, pipeline_size: int, chunks: int) -> tuple[int, ...]:
    """Global stage → pipeline rank, for the pipeline_size * chunks stages of schedule `name`.

    1f1b, interleaved, …   round robin     p = 3, chunks = 2     rank 0: 0 3    rank 1: 1 4    rank 2: 2 5
    zb-v                   there and back                        rank 0: 0 5    rank 1: 1 4    rank 2: 2 3
    """
    ranks = stage_ranks(SCHEDULES[name](pipeline_size, 1, chunks))
    return tuple(ranks[stage] for stage in sorted(ranks))


def stages_of(rank: int, placement: tuple[int, ...]) -> tuple[int, ...]:
    """Return the stages on a pipeline rank, in the order of the model."""
    return tuple(stage for stage, home in enumerate(placement) if home == rank)


# Imported when one of its schedules is used.
SCHEDULES.declare(
    f"{__name__}.classic",
    "gpipe",
    "interleaved",
    "1f1b",
    aliases={"one_f_one_b": "1f1b", "interleaved_1f1b": "interleaved"},
)

__all__ = ["SCHEDULES", "ScheduleFamily", "placement", "schedule", "stages_of"]
