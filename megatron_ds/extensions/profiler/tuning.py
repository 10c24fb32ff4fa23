"""`MeasuredSteps`: the numbers that an autotuner reads after a few steps, with which the run ends (--autotuning)."""

import json
import logging
import statistics
from collections.abc import Sequence
from pathlib import Path

from ...training.moments import RunStart, StepEnd, Stop
from ...training.observe.sink import written
from ...training.observer import FIRST, Observer
from .options import ProfilerConfig

logger = logging.getLogger(__name__)
METRIC_FILE = "autotuning_metric.json"


class MeasuredSteps(Observer):
    """Counts the steps between --autotuning-start-step and --autotuning-end-step."""

    place = FIRST

    def run_started(self, start: RunStart) -> None:
        """Keep what is measured."""
        self._wanted = start.config.of(ProfilerConfig)
        self._mesh = start.replica.mesh
        size = start.config.train.global_batch_size
        assert size is not None, "parsing sets it"
        self._size = size
        # (seconds, FLOPs of all ranks) of steps.
        self._steps: list[tuple[float, float]] = []

    def step_ended(self, end: StepEnd) -> Stop | None:
        """Count the step. After the last one the numbers are in the file, and the run stops."""
        wanted = self._wanted
        if end.step > wanted.autotuning_start_step:
            self._steps.append((end.seconds, end.flops))
        if end.step < wanted.autotuning_end_step + 1:
            return None
        if self._mesh.rank == 0:
            self._write()
        return Stop("autotuning has measured its steps")

    def _write(self) -> None:
        path = Path(self._wanted.autotuning_metric_path or METRIC_FILE)
        numbers = tuned_numbers(self._steps, self._size, self._mesh.grid.world_size)
        if written(path, json.dumps(numbers) + "\n"):
            logger.info("autotuning: %s, written to %s", numbers, path)


def tuned_numbers(
    steps: Sequence[tuple[float, float]], samples: int, ranks: int
) -> dict[str, float]:
    """Return the numbers by DeepSpeed's names, in ms, samples per second and FLOP/s of a rank.

    steps: (seconds, FLOPs of all ranks) of each; at least one. samples: of a step
    """
    seconds = statistics.fmean(step[0] for step in steps)
    return {
        "latency": seconds * 1000,
        "throughput": samples / seconds,
        "FLOPS_per_gpu": statistics.fmean(step[1] for step in steps) / seconds / ranks,
    }
