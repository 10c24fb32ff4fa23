"""The sizes a schedule is asked for, checked in one place and in one wording."""

from collections.abc import Collection

from ...errors import ScheduleError


def check_shape(schedule: str, pipeline_size: int, num_microbatches: int, chunks: int, legal_chunks: Collection[int]) -> None:
    """Raise ScheduleError naming what `schedule` can do instead; `legal_chunks` are the chunks per rank it knows."""
    if pipeline_size < 1:
        raise ScheduleError(f"schedule {schedule!r} was asked for {pipeline_size} pipeline ranks: "
                            "somebody has to compute. Use a pipeline size of 1 or more.")
    if num_microbatches < 1:
        raise ScheduleError(f"schedule {schedule!r} was asked for {num_microbatches} micro-batches: a step needs data. "
                            "Use any number from 1 up (global batch / micro-batch / data-parallel size).")
    if chunks not in legal_chunks:
        raise ScheduleError(f"schedule {schedule!r} was asked for {chunks} chunks of the model per rank, which it has no "
                            f"order for. Legal: {', '.join(map(str, sorted(legal_chunks)))}.")
