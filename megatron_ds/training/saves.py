"""`Saves`: the checkpoints of a run, written at once or, with --async-save, while training goes on.

A save in the background copies the state into host memory beside the next forward and backward; the update waits
for the copies. In the all-reduce of each step ranks count how many have done their part, so that all of them take
the next stage of the save after the same step (`background_save.py` lists the stages). One save is under way at a
time: the next one waits for it, and so does the end of the run. An error of any rank's thread is raised on all
ranks after the next step.
"""

import importlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..host import places
from ..host.pace import Pace
from ..mpu.agree import on_one_rank
from ..progress.ramps import Progress
from .build import Replica
from .no_saves import NoSaves
from .observer import due
from .run_checkpoint import (
    is_finite,
    log_saved,
    new_saving,
    not_finite,
    run_values,
    save_run,
    saved_pieces,
)
from .trigger_files import take_save_file

if TYPE_CHECKING:
    from ..checkpoint.background_save import BackgroundSave, Copies

# The share of one processor for a thread that writes beside a model on a CPU. The threads of a step wait for each
# other, so a step is slower by the share that one of them loses.
WRITERS_SHARE = 0.01


@dataclass
class _Pending:
    """A save under way: when it began, and for how many seconds steps have waited for it."""

    save: "BackgroundSave"
    progress: Progress
    begin: float
    stall: float


class Saves(NoSaves):
    """Saves of one run with --save."""

    def __init__(self, replica: Replica, description: dict, loaded_step: int | None):
        super().__init__(replica, description, loaded_step)
        self._engine = replica
        self._description = description
        self._copies: Copies | None = None
        self._pending: _Pending | None = None
        if replica.config.checkpoint.async_save:
            replica.saving = self
            importlib.import_module("..checkpoint.background_save", __package__)
        if replica.config.checkpoint.save:
            # The import takes 0.8 s on a local disk and minutes on a busy file server: it is part of the start, and
            # neither of the first save nor of the steps beside its thread.
            importlib.import_module("..checkpoint.storage", __package__)

    def save(self, progress: Progress, is_last: bool = False) -> None:
        self.finish()
        self.check()
        self.tried = progress.step
        begin = time.perf_counter()
        with places.phase(places.SAVING):
            if self._engine.config.checkpoint.async_save and not is_last:
                self._begin(progress)
            elif save_run(self._engine, progress, self._description):
                self.step = progress.step
                self.report(progress.step, time.perf_counter() - begin)

    def before_training(self, progress: Progress) -> None:
        checkpoint = self._engine.config.checkpoint
        is_asked = checkpoint.save and 0 in checkpoint.extra_save_iters
        if is_asked and progress.step == 0:
            self.save(progress)

    def is_due(self, step: int) -> bool:
        checkpoint = self._engine.config.checkpoint
        if not checkpoint.save:
            return False
        if due(checkpoint.save_interval, step) or step in checkpoint.extra_save_iters:
            return True
        return self._is_triggered(step)

    def _is_triggered(self, step: int) -> bool:
        """Return whether rank 0 found a file named `save`, which it removes. It looks at the steps of
        --log-interval.
        """
        config = self._engine.config
        if not config.train.trigger_path or not due(config.logging.log_interval, step):
            return False
        world = self._engine.mesh.group("world")
        return on_one_rank(world, lambda: take_save_file(config.train))

    def at_end(self, progress: Progress) -> None:
        self.finish()
        known = (self.step, self.tried)
        if self._engine.config.checkpoint.save and progress.step not in known:
            self.save(progress, is_last=True)

    @property
    def is_ready(self) -> bool:
        """Whether this rank's thread has done its part of the save under way."""
        return self._pending is not None and self._pending.save.is_ready

    def before_update(self) -> None:
        """Called before state changes: waits for the copies of the save that has begun."""
        if self._pending is not None:
            begin = time.perf_counter()
            with places.phase(places.SAVING):
                self._pending.save.copied.wait()
            self._pending.stall += time.perf_counter() - begin

    def after_step(self, ready: int) -> None:
        pending = self._pending
        if pending is not None and ready == self._engine.mesh.group("world").size:
            self._advance(pending)

    def finish(self) -> None:
        while (pending := self._pending) is not None:
            self._advance(pending)

    def pace(self) -> Pace:
        """Return the pace of the thread of a save.

        It writes without pauses beside a GPU, which does not compute with the processors of the thread.
        """
        return Pace(WRITERS_SHARE if self._engine.mesh.device.type == "cpu" else 1.0)

    def _advance(self, pending: _Pending) -> None:
        """Take the next step of the save under way, and report what it brought."""
        was_complete = pending.save.path is not None
        # After an error there is nothing to wait for.
        self._pending = None
        begin = time.perf_counter()
        with places.phase(places.SAVING):
            has_ended = pending.save.advance()
        pending.stall += time.perf_counter() - begin
        if not has_ended:
            self._pending = pending
        if not is_finite(pending.save.reasons, pending.progress, self._engine):
            return
        path = pending.save.path
        if path is not None and not was_complete:
            self._report(pending, path)

    def _report(self, pending: _Pending, path: Path) -> None:
        self.step = pending.save.step
        if self._engine.mesh.rank == 0:
            log_saved(path, pending.begin, pending.stall)
        self.report(pending.save.step, pending.stall)

    def _begin(self, progress: Progress) -> None:
        from ..checkpoint.background_save import BackgroundSave, Copies

        begin = time.perf_counter()
        if self._copies is None:
            self._copies = Copies()
        save = BackgroundSave(
            new_saving(self._engine, progress),
            saved_pieces(self._engine),
            run_values(self._engine, progress, self._description),
            self._copies,
            not_finite,
            self.pace(),
        )
        stall = time.perf_counter() - begin
        self._pending = _Pending(save, progress, begin, stall)
