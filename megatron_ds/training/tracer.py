"""`Tracer`: the timelines of a few steps, as files (`--trace`).

One file a pipeline rank, FOLDER/pipeline-rank-N.json, written by the first tensor- and data-parallel rank of each stage: those
ranks are one pipeline. The others record nothing.
"""

import logging
from contextlib import contextmanager
from pathlib import Path

from ..pipeline.timeline import Timeline, write_trace
from .build import Engine
from .sink import reason_of

logger = logging.getLogger(__name__)
TRACED = (2, 3)          # the first step allocates and connects


class Tracer:
    def __init__(self, engine: Engine):
        wanted, mesh = engine.config.logging, engine.mesh
        is_first = not any(at for axis, at in mesh.grid.coordinates(mesh.rank).items() if axis != "pp")
        self._engine, self._done, self._entries = engine, 0, []
        self._folder = Path(wanted.trace) if wanted.trace and is_first else None
        first, last = wanted.trace_steps or TRACED
        self._steps = range(first, last + 1)

    @contextmanager
    def step(self):
        """Around a training step. The file is written after each recorded step, so a run may end at any time."""
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
        """A full disk must not end the run: no further step is recorded then."""
        try:
            write_trace(path, {rank: self._entries})
        except OSError as error:
            logger.warning("cannot write %s: %s. Training goes on; the %d recorded instruction(s) are lost, and --trace is "
                           "switched off.", path, reason_of(error), len(self._entries))
            self._folder, self._entries = None, []
