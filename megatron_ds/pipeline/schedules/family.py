"""The table of schedules, and the sizes that they are asked for, checked in one place and in one wording."""

from collections.abc import Callable, Collection
from functools import lru_cache, wraps

from ...errors import ScheduleError
from ...registry import Registry
from ..instruction import Schedule

MakeSchedule = Callable[..., Schedule]             # (pipeline_size, num_microbatches, chunks=1) → Schedule
SCHEDULES: Registry[MakeSchedule] = Registry("pipeline schedule")
LEGAL_CHUNKS: dict[str, Collection[int] | None] = {}        # schedule → chunks of the model per rank; None: any number
Peak = Callable[[int, int, int, int], int]                  # (pipeline_size, num_microbatches, chunks, rank) → activations
PEAKS: dict[str, Peak] = {}
OPTIONS: dict[str, tuple[str, ...]] = {}                    # schedule → what else its function takes
REMEMBERED = 8                                              # orders of a schedule: those of training and of evaluation


def schedule(name: str, *aliases: str, chunks: Collection[int] | None = (1,),
             peak: Peak | None = None, options: Collection[str] = ()) -> Callable[[MakeSchedule], MakeSchedule]:
    """Decorator that registers a schedule, which is then asked for legal sizes only, and once for each.

    chunks    the numbers of model chunks per rank it has an order for; None: any
    options   keyword arguments that the function takes, of `costs` (a StageCosts), `memory_limit` and `group_size`
    peak      how many activations (of one micro-batch at one stage) a rank keeps alive at most, which tests hold it to; where
              none is declared only the simulator knows
    """

    def register(make: MakeSchedule) -> MakeSchedule:
        LEGAL_CHUNKS[name], OPTIONS[name] = chunks, tuple(options)
        remembering = lru_cache(REMEMBERED)(make)
        if peak is not None:
            PEAKS[name] = peak

        @wraps(make)
        def checked(pipeline_size: int, num_microbatches: int, chunks: int = default_chunks(name), **options) -> Schedule:
            check_shape(name, pipeline_size, num_microbatches, chunks)
            return remembering(pipeline_size, num_microbatches, chunks, **options)

        return SCHEDULES.register(name, *aliases)(checked)

    return register


def default_chunks(name: str) -> int:
    """The fewest chunks per rank that the schedule can work with."""
    legal = LEGAL_CHUNKS.get(name)
    return 1 if legal is None else min(legal)


def serves(name: str, chunks: int) -> bool:
    """Has the schedule an order for that many chunks per rank?"""
    legal = LEGAL_CHUNKS.get(name)
    return chunks >= 1 if legal is None else chunks in legal


def check_shape(name: str, pipeline_size: int, num_microbatches: int, chunks: int) -> None:
    """Raise ScheduleError naming what this schedule, and which other schedules, can do instead."""
    if pipeline_size < 1:
        raise ScheduleError(f"schedule {name!r} cannot run on {pipeline_size} pipeline ranks: "
                            "at least one rank has to compute. Use a pipeline size of 1 or more.")
    if num_microbatches < 1:
        raise ScheduleError(f"schedule {name!r} cannot run {num_microbatches} micro-batches: a step needs at least one. "
                            "Use any number from 1 up (global batch / micro-batch / data-parallel size); every schedule "
                            "accepts all of them.")
    if not serves(name, chunks):
        able = [other for other in SCHEDULES if serves(other, chunks)]
        raise ScheduleError(f"schedule {name!r} does not support {chunks} chunks of the model per rank. "
                            f"Valid: {chunks_text(name)}. Schedules for {chunks} chunks: "
                            f"{', '.join(able) or 'none, use 1 or more'}.")


def chunks_text(name: str) -> str:
    legal = LEGAL_CHUNKS[name]
    return "any number from 1 up" if legal is None else ", ".join(map(str, sorted(legal)))
