"""`Tracer`: write timelines of a few steps to files (`--trace`).

One file per pipeline rank, FOLDER/pipeline-rank-N.json, written by the ranks whose other coordinates are all
0: these ranks form one pipeline. Other ranks record nothing.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..pipeline.timeline import Timeline, write_trace
from .build import Engine
from .sink import reason_of

logger = logging.getLogger(__name__)
TRACED = (2, 3)          # the first step allocates and connects


class Tracer:
    """Records the instructions of the steps --trace-steps on the ranks of one pipeline."""

    def __init__(self, engine: Engine):
        wanted, mesh = engine.config.logging, engine.mesh
        is_first = not any(at for axis, at in mesh.grid.coordinates(mesh.rank).items() if axis != "pp")
        self._engine, self._done, self._entries = engine, 0, []
        self._folder = Path(wanted.trace) if wanted.trace and is_first else None
        first, last = wanted.trace_steps or TRACED
        self._steps = range(first, last + 1)

    @contextmanager
    def step(self) -> Iterator[None]:
        """A context around a training step.

        The file is written after each recorded step: a run may end at any time.
        """
        self._done += 1
        if self._folder is None or self._done not in self._steps:
            yield
            return
        executor, rank = self._engine.executor, self._engine.mesh.coordinate("pp")
        executor.timeline = timeline = Timeline(self._engine.mesh.device)
        try:
            yield
        finally:
            executor.timeline = None
        self._entries += timeline.read()
        self._write(self._folder / f"pipeline-rank-{rank}.json", rank)

    def _write(self, path: Path, rank: int) -> None:
        """Write the entries so far. If that fails, log a warning and record no further steps."""
        try:
            write_trace(path, {rank: self._entries})
        except OSError as error:
            logger.warning("cannot write %s: %s. Training continues; the %d recorded instruction(s) are "
                           "lost, and --trace is switched off.", path, reason_of(error), len(self._entries))
            self._folder, self._entries = None, []
