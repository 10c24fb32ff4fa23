"""`Tracer`: the timelines of a few steps, as files (`--trace`).

One file a pipeline rank, FOLDER/pipeline-rank-N.json, written by the first tensor- and data-parallel rank of each stage: those
ranks are one pipeline. The others record nothing.
"""

from contextlib import contextmanager
from pathlib import Path

from ..pipeline.timeline import Timeline
from ..pipeline.trace import write_trace
from .build import Engine

TRACED = (2, 3)          # the first step allocates and connects


class Tracer:
    def __init__(self, engine: Engine):
        logging, mesh = engine.config.logging, engine.mesh
        is_first = not any(at for axis, at in mesh.grid.coordinates(mesh.rank).items() if axis != "pp")
        self._engine, self._done, self._entries = engine, 0, []
        self._folder = Path(logging.trace) if logging.trace and is_first else None
        first, last = logging.trace_steps or TRACED
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
        write_trace(self._folder / f"pipeline-rank-{rank}.json", {rank: self._entries})
