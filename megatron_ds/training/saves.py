"""`Saves`: the checkpoints of a run, written at once or, with --async-save, while training goes on.

A save in the background has one stall, in which the state is copied into host memory. Ranks then train on; in the
all-reduce of each step they count how many have written their file, so that all of them publish the checkpoint
after the same step. One save is under way at a time: the next one waits for it, and so does the end of the run.
An error of any rank's writer is raised on all ranks after the next step.
"""

import time
from dataclasses import dataclass

from ..checkpoint.background_save import BackgroundSave, Copies
from ..host import places
from ..progress.ramps import Progress
from .build import Replica
from .run_checkpoint import (
    is_finite,
    log_saved,
    new_saving,
    not_finite,
    run_values,
    save_run,
    saved_pieces,
)


@dataclass
class _Pending:
    """A save under way: when it began, and for how many seconds steps have waited for it."""

    save: BackgroundSave
    progress: Progress
    begin: float
    stall: float


class Saves:
    """Saves of one run.

    step       of the newest complete checkpoint of this process, or of the one that it loaded; -1 without one
    tried      the last step at which a save was asked for
    """

    def __init__(self, engine: Replica, description: dict, loaded_step: int | None):
        self.step = -1 if loaded_step is None else loaded_step
        self.tried = -1
        self._engine = engine
        self._description = description
        self._copies = Copies()
        self._pending: _Pending | None = None
        if engine.config.checkpoint.async_save:
            engine.saving = self

    def save(self, progress: Progress, is_last: bool = False) -> None:
        """Save this moment, in the background if --async-save is given and training goes on. Collective."""
        self.finish()
        self.tried = progress.step
        with places.phase(places.SAVING):
            if self._engine.config.checkpoint.async_save and not is_last:
                self._begin(progress)
            elif save_run(self._engine, progress, self._description):
                self.step = progress.step

    @property
    def is_written(self) -> bool:
        """Whether this rank has written its file of the save under way."""
        return self._pending is not None and self._pending.save.is_written

    def before_update(self) -> None:
        """Called before state changes: a GPU first completes the copies of the save that has begun."""
        if self._pending is not None:
            self._pending.save.copied.wait()

    def after_step(self, written: int) -> None:
        """Publish the save under way when all ranks have written. written: the ranks that have. Collective."""
        if written == self._engine.mesh.group("world").size:
            self.finish()

    def finish(self) -> None:
        """Wait for the save under way, if any, and publish it. Collective over the world.

        Raises CheckpointError on all ranks when any rank failed.
        """
        pending = self._pending
        if pending is None:
            return
        # After an error there is nothing to wait for.
        self._pending = None
        wait = time.perf_counter()
        with places.phase(places.SAVING):
            path, found = pending.save.publish()
        if not is_finite(found, pending.progress, self._engine):
            return
        self.step = pending.save.step
        if self._engine.mesh.rank == 0:
            stall = pending.stall + time.perf_counter() - wait
            log_saved(path, pending.begin, stall)

    def _begin(self, progress: Progress) -> None:
        begin = time.perf_counter()
        save = BackgroundSave(
            new_saving(self._engine, progress),
            saved_pieces(self._engine),
            run_values(self._engine, progress, self._description),
            self._copies,
            not_finite,
        )
        stall = time.perf_counter() - begin
        self._pending = _Pending(save, progress, begin, stall)
