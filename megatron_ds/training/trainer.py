"""The training loop: step, log, evaluate, save, until the run is complete or asked to stop.

Only `Trainer.progress` changes; learning rate, batch size and data position are functions of it. What else happens
in a run is in observers (observer.py), which are called at its moments.
"""

import time
from dataclasses import replace
from datetime import timedelta
from typing import Any

from ..batch.batch import Batch
from ..cli import StopRequest
from ..config.training_schedule import (
    make_batch_size,
    make_beta1,
    make_learning_rates,
    make_weight_decay,
)
from ..errors import MegatronDSError
from ..host import places
from ..planning.training_length import make_length
from ..progress.ramps import Progress
from .build import Replica
from .evaluations import Evaluations
from .interval import LoggedInterval
from .loaders import Loaders
from .moments import RunStart, StepEnd, Stop
from .no_saves import NoSaves
from .observe.log import Log
from .observe.records import Record, TrainRecord
from .observer import Observer, due
from .step import StepOutcome, train_step
from .step_size import StepSize, StepSizes
from .stopping import Stopping

FINISHED = "finished"
EVALUATED = "evaluated only"


class Trainer:
    """Trains `replica` on `loaders` until the run is complete, or a signal, a limit or an observer ends it."""

    def __init__(
        self,
        replica: Replica,
        loaders: Loaders,
        log: Log,
        progress: Progress,
        description: dict[str, Any],
        observer: Observer,
        started: float | None = None,
        stop: StopRequest | None = None,
    ):
        self.replica = replica
        self.loaders = loaders
        self.log = log
        self.progress = progress
        self.observer = observer
        self.config = config = replica.config
        self.started = started or time.monotonic()
        self.stopping = Stopping(
            config, replica.mesh, stop or StopRequest(), self.started
        )
        # Numbers that change from step to step.
        self.learning_rates = make_learning_rates(config)
        self.weight_decay = make_weight_decay(config)
        self.beta1 = make_beta1(config)
        self.batch_size = make_batch_size(config)
        self.sizes = StepSizes(config)
        self.length = make_length(config)
        # What is logged, evaluated and saved.
        total = progress.step + self.length.steps_after(progress)
        self.interval = LoggedInterval(replica, total)
        self.evaluations = Evaluations(replica, loaders, log, observer, self.stopping)
        loaded = progress.step if config.checkpoint.load else None
        self.saves = _saves_of(replica, description, loaded)
        self.saves.check = loaders.compare
        self.saves.report = self._saved
        self._total = total

    # ------------------------------------------------------------------ the run
    def run(self) -> str:
        """Train to the end, and save what is unsaved. Returns why training ended, its steps and its time."""
        first = self.progress.step
        self.stopping.request.defer()
        self.log.begin(first, self._total)
        places.enter_step(first, places.STARTING)
        try:
            reason = self._run()
        except MegatronDSError as error:
            # All ranks stop here, so that they can complete the checkpoint under way.
            if getattr(error, "on_all_ranks", False):
                self.saves.finish()
            raise
        finally:
            places.enter_phase(places.ENDING)
            try:
                self.observer.closed()
            finally:
                self.log.close()
        total = timedelta(seconds=round(time.monotonic() - self.started))
        steps = self.progress.step - first
        return f"{reason}; {steps} step{'s' if steps != 1 else ''}, total time {total}"

    def _run(self) -> str:
        self.observer.run_started(self._start())
        self.saves.before_training(self.progress)
        reason = EVALUATED if self.config.train.skip_train else self._loop()
        # What is left when the steps are done.
        self.saves.at_end(self.progress)
        if reason in (FINISHED, EVALUATED):
            self.observer.trained(self.progress)
            self.evaluations.at_end(self.progress)
        self.loaders.compare()
        self.observer.run_ended(reason)
        return reason

    def _start(self) -> RunStart:
        return RunStart(
            self.config,
            self.replica,
            self.loaders,
            self.progress,
            self.started,
            self._write,
            self.log.note,
            self.stopping.request.request,
        )

    def _saved(self, step: int, seconds: float) -> None:
        self.observer.saved(step)
        self.observer.waited_for_save(step, seconds)

    def _write(self, record: Record) -> None:
        """Write a record of an observer. On rank 0 alone."""
        if self.replica.mesh.rank == 0:
            self.log.write(record)

    # ------------------------------------------------------------------ the loop
    def _loop(self) -> str:
        while not self._is_finished():
            stop = self._step() or self._after_step()
            if stop is not None:
                return stop.reason
        return FINISHED

    def _is_finished(self) -> bool:
        return self.length.is_reached(self.progress)

    def _step(self) -> Stop | None:
        """Train on the next batch. Returns why the run stops after it. Collective over the world."""
        before = self.progress
        step = before.step + 1
        self.observer.step_began(step)
        # Read.
        size = self.batch_size(before)
        begin = time.perf_counter()
        with places.phase(places.READING):
            batch = self.replica.batches.training(self.loaders.train, before, size)
        read = time.perf_counter()
        self.observer.batch_read(step, batch)
        observed = time.perf_counter() - read
        # Train.
        outcome = self._train(batch)
        outcome = replace(outcome, seconds=outcome.seconds + observed)
        # Count.
        trained = self.sizes.of(batch, size, before.step)
        self.progress = before.after(
            size,
            trained.tokens,
            skipped=outcome.skipped,
            nan=not outcome.is_finite,
            layer_tokens=trained.samples * trained.layer_tokens,
        )
        places.enter_step(step)
        end = self._end(outcome, trained, size, read - begin)
        self.interval.add(outcome, end)
        stop = self.observer.step_ended(end)
        # Log.
        self.observer.step_logged(step, self._log(outcome, end))
        # Stop.
        self.saves.after_step(outcome.ready)
        return Stop(self.stopping.reason()) if outcome.stop else stop

    def _train(self, batch: Batch) -> StepOutcome:
        """Train on the batch. Collective over the world."""
        before = self.progress
        with self.observer.around(before.step + 1):
            return train_step(
                self.replica,
                batch,
                before,
                learning_rate={
                    name: rate(before) for name, rate in self.learning_rates.items()
                },
                weight_decay=self.weight_decay(before),
                beta1=self.beta1(before) if self.beta1 else None,
                stop=self.stopping.is_asked(),
                observer=self.observer,
            )

    def _end(
        self, outcome: StepOutcome, trained: StepSize, size: int, data_seconds: float
    ) -> StepEnd:
        return StepEnd(
            step=self.progress.step,
            size=size,
            samples=self.progress.samples,
            tokens=trained.tokens,
            loss=outcome.loss,
            grad_norm=outcome.grad_norm,
            seconds=outcome.seconds + data_seconds,
            skipped=outcome.skipped,
            of_ranks=outcome.of_ranks,
            data_seconds=data_seconds,
            flops=self.interval.flops(trained),
            trained=trained,
            dropped=outcome.dropped,
        )

    def _log(self, outcome: StepOutcome, end: StepEnd) -> TrainRecord | None:
        """Log the steps since the last line, if one is due. Returns what rank 0 wrote.

        Collective over the world for what observers ask for.
        """
        self.log.advance(end.step, end.loss, end.tokens / end.seconds)
        is_due = due(self.config.logging.log_interval, end.step)
        if not (is_due or outcome.stop or self._is_finished()):
            return None
        numbers = self.observer.numbers()
        record = None
        if self.replica.mesh.rank == 0:
            record = self.interval.record(self.progress, numbers.fields, numbers.tags)
            self.log.write(record)
        if is_due:
            self.interval.clear()
        return record

    def _after_step(self) -> Stop | None:
        """Evaluate and save what is due. Returns why the run stops. Collective over the world."""
        step = self.progress.step
        if self.evaluations.after_step(self.progress):
            return Stop(self.stopping.reason())
        self.observer.between_steps(self.progress)
        if self.saves.is_due(step):
            self.saves.save(self.progress)
        interval = self.config.train.exit_interval
        if due(interval, step) and not self._is_finished():
            return Stop(f"exit interval {interval}")
        return None


def _saves_of(replica: Replica, description: dict, loaded_step: int | None) -> NoSaves:
    """Return the saves of a run. loaded_step: of the checkpoint with which it began"""
    if not replica.config.checkpoint.save:
        return NoSaves(replica, description, loaded_step)
    from .saves import Saves

    return Saves(replica, description, loaded_step)
