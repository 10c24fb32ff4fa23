"""`TracedSteps`: the instructions of a few steps, on the ranks of one pipeline (--trace)."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...errors import DataError
from ...host import places
from ...pipeline.timeline import Entry, Timeline
from ...training.moments import RunStart
from ...training.observe.sink import reason_of
from ...training.observer import LAST, Observer
from ..report.trace_files import write_trace

logger = logging.getLogger(__name__)
TRACED = (2, 3)  # the first step allocates and connects


class TracedSteps(Observer):
    """Records the instructions of the steps --trace-steps on the ranks of one pipeline."""

    place = LAST

    def run_started(self, start: RunStart) -> None:
        """Keep what is recorded."""
        wanted = start.config.logging
        self._replica = start.replica
        mesh = start.replica.mesh
        is_first = not any(
            at for axis, at in mesh.grid.coordinates(mesh.rank).items() if axis != "pp"
        )
        self._done = 0
        self._entries: list[Entry] = []
        self._folder = Path(wanted.trace) if wanted.trace and is_first else None
        first, last = wanted.trace_steps or TRACED
        self._steps = range(first, last + 1)

    @contextmanager
    def around(self, step: int) -> Iterator[None]:
        """Record the step, if it is asked for. The file is written after each: a run may end at any time."""
        self._done += 1
        if self._folder is None or self._done not in self._steps:
            yield
            return
        executor = self._replica.executor
        rank = self._replica.mesh.coordinate("pp")
        executor.timeline = timeline = Timeline(self._replica.mesh.device)
        try:
            yield
        finally:
            executor.timeline = None
        # Write the entries so far. If that fails, log a warning and record no further steps.
        self._entries += timeline.read()
        path = self._folder / f"pipeline-rank-{rank}.json"
        try:
            with places.phase(places.EXPORTING):
                write_trace(path, {rank: self._entries})
        except (OSError, DataError) as error:
            logger.warning(
                "cannot write %s: %s. Training continues; the %d recorded instruction(s) are "
                "lost, and --trace is switched off.",
                path,
                reason_of(error) if isinstance(error, OSError) else error,
                len(self._entries),
            )
            self._folder = None
            self._entries = []
