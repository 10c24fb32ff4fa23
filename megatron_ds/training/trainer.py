"""The training loop: step, log, evaluate, save, until the run is complete or asked to stop.

Only `Trainer.progress` changes; learning rate, batch size and data position are functions of it.
"""

import logging
import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch

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
from ..mpu.agree import on_one_rank
from ..mpu.collectives import all_gather_object
from ..ops.kernel_table import implementations_recorded, kernels_text
from ..planning.flops import layers_of_run, model_flops, peak_flops, utilization
from ..planning.training_length import make_length
from ..progress.ramps import Progress
from .batches import BatchSource
from .build import Replica
from .evaluation_tasks import EvaluationTasks
from .observe.flops_profile import FlopsProfiler, StepSize
from .observe.log import Log
from .observe.measurements import due, measurements
from .observe.phase_times import PhaseTimes, times_text
from .observe.records import EvalRecord, RerunRecord, SpikeRecord, TrainRecord
from .observe.run_facts import SaveRecord, process_record
from .observe.state_statistics import (
    peak_memory_gib,
)
from .observe.task_record import TaskRecord
from .observer import Observer, RunStart, StepEnd, observers_of
from .rerun import Rerun
from .saves import Saves
from .spikes import check_spikes_in_a_row
from .step import StepOutcome, Tracer, evaluate, train_step
from .step_metrics import stop_reason
from .trigger_files import exit_file, take_save_file

EVALUATED = "evaluated only"

logger = logging.getLogger(__name__)
STALLED = 0.1  # fraction of a step that may be waiting for data without a warning


@dataclass(frozen=True)
class Loaders:
    """Train, validation and test data of a run; the last two may be None."""

    train: BatchSource
    valid: BatchSource | None = None
    test: BatchSource | None = None

    def compare(self) -> None:
        """Compare what ranks with copies of their own read (`SecondReading`). Collective over the world."""
        for loader in (self.train, self.valid, self.test):
            if hasattr(loader, "compare"):
                loader.compare()


@dataclass(frozen=True)
class _Done:
    """A step of the next log line. data_seconds: waiting for the batch. tokens, flops: of all ranks."""

    outcome: StepOutcome
    data_seconds: float
    tokens: int
    flops: float


class Trainer:
    """Trains `engine` on `loaders` until the run is complete, or a signal or a limit ends it."""

    def __init__(
        self,
        engine: Replica,
        loaders: Loaders,
        log: Log,
        progress: Progress,
        description: dict,
        started: float | None = None,
        stop: StopRequest | None = None,
        tasks: EvaluationTasks | None = None,
    ):
        self.engine = engine
        self.loaders = loaders
        self.log = log
        self.progress = progress
        self.config = config = engine.config
        # Schedules of numbers that change from step to step.
        self.learning_rates = make_learning_rates(config)
        self.weight_decay = make_weight_decay(config)
        self.beta1 = make_beta1(config)
        self.batch_size = make_batch_size(config)
        self.length = make_length(config)
        # Progress, of the whole run and of this process.
        self._planned = self.length.steps_after()
        self._total = progress.step + self.length.steps_after(progress)
        self._kept = config.kept_tokens
        self._layers = layers_of_run(config)
        self.started = started or time.monotonic()
        self.stop = stop or StopRequest()
        self.tracer = Tracer(engine)
        self.times = PhaseTimes(config.logging.timing_log_level, engine.mesh.device)
        loaded = progress.step if config.checkpoint.load else None
        self.saves = Saves(engine, description, loaded)
        self.saves.report = self._report_save
        self.saves.check = loaders.compare
        if engine.reruns is not None:
            engine.reruns.report = self._record_rerun
        self.tasks = tasks
        objective = config.objective
        self._is_of_tokens = objective is None or objective.is_of_tokens
        # Those of features first, so that measurements around a step are free of them.
        self.observers = (*observers_of(config), *measurements(config))
        # What happened when.
        self._validated_step = -1
        self._tasks_step = -1
        self._has_warned_of_stall = self._has_tuned = False
        # What is logged, since the last line.
        self._window: list[_Done] = []
        self._vocab = config.padded_vocab_size
        dtype = engine.parameters[0].dtype if engine.parameters else torch.float32
        self._peak = peak_flops(engine.mesh.device, dtype)
        self.profiler = FlopsProfiler(config, engine.mesh, self._peak)

    # ------------------------------------------------------------------ the loop
    def run(self) -> str:
        """Train to the end, and save what is unsaved. Returns why training ended, its steps and its time."""
        first = self.progress.step
        self.stop.defer()
        self.log.begin(first, self._total)
        mesh = self.engine.mesh
        self.log.note(process_record(self.config, mesh, first, self.started))
        if (watched := places.writer()) is not None:
            watched.step(first, places.STARTING)
        # Observers that have begun are closed in any case.
        begun: list[Observer] = []
        try:
            for observer in self.observers:
                observer.run_started(self._start())
                begun.append(observer)
            self._save_before_training()
            reason = EVALUATED if self.config.train.skip_train else self._loop()
            # What is left when the steps are done.
            self._save_what_is_left()
            if reason in ("finished", EVALUATED):
                self._evaluate_everything()
            self.loaders.compare()
            for observer in self.observers:
                observer.run_ended(reason)
        except MegatronDSError as error:
            # All ranks stop here, so that they can complete the checkpoint under way.
            if getattr(error, "on_all_ranks", False):
                self.saves.finish()
            raise
        finally:
            if (watched := places.writer()) is not None:
                watched.phase(places.ENDING)
            with ExitStack() as closing:
                closing.callback(self.log.close)
                for observer in begun:
                    closing.callback(observer.closed)
        total = timedelta(seconds=round(time.monotonic() - self.started))
        steps = self.progress.step - first
        return f"{reason}; {steps} step{'s' if steps != 1 else ''}, total time {total}"

    def _start(self) -> RunStart:
        return RunStart(
            self.config, self.engine, self.progress, self.log.note, self.stop.request
        )

    def _save_before_training(self) -> None:
        checkpoint = self.config.checkpoint
        is_asked = checkpoint.save and 0 in checkpoint.extra_save_iters
        if is_asked and self.progress.step == 0:
            self.saves.save(self.progress)

    def _save_what_is_left(self) -> None:
        """Wait for the save under way, and save the last step unless that has been done or tried."""
        self.saves.finish()
        known = (self.saves.step, self.saves.tried)
        if self.config.checkpoint.save and self.progress.step not in known:
            self.saves.save(self.progress, is_last=True)

    def _loop(self) -> str:
        # The first step differs in what it logs.
        step_and_log = self._first_step
        while not self._is_finished():
            outcome = step_and_log()
            step_and_log = self._step
            self.saves.after_step(outcome.ready)
            if outcome.stop:
                return self._stop_reason()
            if self._has_tuned:
                return "autotuning has measured its steps"
            # What follows some steps: an evaluation, a comparison of replicas, a checkpoint.
            train = self.config.train
            step = self.progress.step
            if (
                train.eval_iters
                and self.loaders.valid
                and due(train.eval_interval, step)
            ):
                if self.evaluate("validation"):
                    return self._stop_reason()
            if self.tasks and due(train.eval_tasks_interval, step):
                self.evaluate_tasks()
            if self.config.checkpoint.save and (
                due(self.config.checkpoint.save_interval, step)
                or self._saves_besides(step)
            ):
                self.saves.save(self.progress)
            if due(train.exit_interval, step) and not self._is_finished():
                return f"exit interval {train.exit_interval}"
        return "finished"

    def _is_finished(self) -> bool:
        return self.length.is_reached(self.progress)

    def _wants_to_stop(self) -> bool:
        return (
            bool(self.stop.received)
            or self._is_over_time()
            or self._found_file() is not None
        )

    def _found_file(self) -> str | None:
        """The file that asks for the end of the run, if rank 0 sees it."""
        return exit_file(self.config.train) if self.engine.mesh.rank == 0 else None

    def _saves_besides(self, step: int) -> bool:
        """Whether the step is one of --extra-save-iters, or rank 0 found a file named `save`, which it
        removes. Collective over the world at the steps of --log-interval, if --trigger-path is given.
        """
        if step in self.config.checkpoint.extra_save_iters:
            return True
        if not self.config.train.trigger_path or not due(
            self.config.logging.log_interval, step
        ):
            return False
        world = self.engine.mesh.group("world")
        return on_one_rank(world, lambda: take_save_file(self.config.train))

    def _is_over_time(self) -> bool:
        minutes = self.config.train.exit_duration_in_mins
        return minutes is not None and time.monotonic() - self.started > minutes * 60

    def _stop_reason(self) -> str:
        """Why a rank asked to stop. Collective over the world."""
        limit = (
            self.config.train.exit_duration_in_mins if self._is_over_time() else None
        )
        asked = (self.stop.received, limit, self._found_file())
        return stop_reason(all_gather_object(asked, self.engine.mesh.group("world")))

    # ------------------------------------------------------------------ one step
    def _first_step(self) -> StepOutcome:
        """A step after which the log names the kernels that rank 0 ran."""
        with implementations_recorded() as ran:
            outcome = self._step()
        if self.engine.mesh.rank == 0:
            logger.info("%s", kernels_text(ran))
        return outcome

    def _step(self) -> StepOutcome:
        # Read
        before = self.progress
        for observer in self.observers:
            observer.step_began(before.step + 1)
        begin = time.perf_counter()
        size = self.batch_size(before)
        with places.phase(places.READING):
            batch = self.engine.batches.training(self.loaders.train, before, size)
        data_seconds = time.perf_counter() - begin
        trained = self._size(batch, size)
        measuring = self._observe_batch(before.step + 1, batch)
        # Train
        profile = self.profiler.times(before.step)
        outcome = self._train(batch, profile or self.times)
        outcome = replace(outcome, seconds=outcome.seconds + measuring)
        self.times.wait(data_seconds)
        # Count
        self.progress = before.after(
            size,
            trained.tokens,
            skipped=outcome.skipped,
            nan=not outcome.is_finite,
            layer_tokens=trained.samples
            * self._layer_tokens(before.step, trained.length),
        )
        flops = model_flops(
            self._layers,
            trained.samples,
            trained.length,
            self._vocab,
            trained.kept,
        )
        self._window.append(_Done(outcome, data_seconds, trained.tokens, flops))
        if (watched := places.writer()) is not None:
            watched.step(self.progress.step)
        if outcome.spike is not None:
            self._record_spike(outcome, before, size)
        # Profile
        seconds = outcome.seconds + data_seconds
        if profile is not None:
            times = profile.take()
            self.times.add(times)
            self.profiler.report(times, before.step + 1, trained, seconds)
        self._has_tuned = self.profiler.count(before.step + 1, seconds, flops)
        self._end_step(outcome, size, trained.tokens, seconds)
        # Log
        self.log.advance(self.progress.step, outcome.loss, trained.tokens / seconds)
        is_due = due(self.config.logging.log_interval, self.progress.step)
        if is_due or outcome.stop or self._is_finished():
            self._write_record(size, trained)
        if is_due:
            self._window.clear()
        return outcome

    def _observe_batch(self, step: int, batch: Batch) -> float:
        """Call the observers. Returns the seconds that they took."""
        begin = time.perf_counter()
        for observer in self.observers:
            observer.batch_read(step, batch)
        return time.perf_counter() - begin

    def _end_step(
        self, outcome: StepOutcome, size: int, tokens: int, seconds: float
    ) -> None:
        end = StepEnd(
            self.progress.step,
            size,
            self.progress.samples,
            tokens,
            outcome.loss,
            outcome.grad_norm,
            seconds,
            outcome.skipped,
            outcome.of_ranks or (),
        )
        for observer in self.observers:
            observer.step_ended(end)

    def _report_save(self, step: int, stall: float) -> None:
        self.log.note(SaveRecord(step, stall))
        for observer in self.observers:
            observer.saved(step)

    def _size(self, batch: Batch, size: int) -> StepSize:
        """What the next step trains on, over all ranks. size: of the global batch, in samples."""
        rows = size * batch.rows_per_sample
        length = batch.whole_length
        if self._kept is None:
            return StepSize(rows, length)
        return StepSize(rows, length, self._kept.kept_at(self.progress.step, length))

    def _train(self, batch: Batch, times: PhaseTimes) -> StepOutcome:
        """Train on the batch, under the profilers of this step. Collective over the world."""
        before = self.progress
        with ExitStack() as around:
            for observer in self.observers:
                around.enter_context(observer.around(before.step + 1))
            around.enter_context(self.tracer.step())
            rates = {name: rate(before) for name, rate in self.learning_rates.items()}
            outcome = train_step(
                self.engine,
                batch,
                before,
                learning_rate=rates,
                weight_decay=self.weight_decay(before),
                beta1=self.beta1(before) if self.beta1 else None,
                stop=self._wants_to_stop(),
                times=times,
            )
        return outcome

    def _write_record(self, size: int, trained: StepSize) -> None:
        """Write the line of the steps since the last one. Collective over the world for what options ask for."""
        asked = self._asked_numbers()
        if self.engine.mesh.rank:
            return
        record = replace(self._record(size, trained), **asked)
        self.log.write(record)
        if record.times:
            text = times_text(record.times, self.config.logging.timing_log_option)
            logger.info("%s", text)
        self._warn_of_stall(record)

    def _record_spike(self, outcome: StepOutcome, before: Progress, size: int) -> None:
        """Log a step whose update was dropped, with its samples; raises SpikesError after too many."""
        spike = outcome.spike
        step = before.step + 1
        if self.engine.mesh.rank == 0:
            self.log.write(
                SpikeRecord(
                    step=step,
                    samples=before.samples + size,
                    loss=outcome.loss,
                    grad_norm=spike.norm,
                    norm_bound=spike.bound,
                    in_a_row=spike.in_a_row,
                    first_sample=before.samples,
                    sample_ids=tuple(self.loaders.train.indices(before.samples, size)),
                )
            )
        check_spikes_in_a_row(spike, step, self.config.train.skip_spikes_limit)

    def _record_rerun(self, rerun: Rerun) -> None:
        """Log the step under way, which was computed again."""
        if self.engine.mesh.rank or not rerun.is_news:
            return
        before = self.progress
        self.log.write(
            RerunRecord(
                before.step + 1,
                before.samples + self.batch_size(before),
                rerun.why,
                rerun.verdict,
                rerun.ranks,
                *rerun.losses,
                *rerun.norms,
            )
        )

    def _asked_numbers(self) -> dict[str, Any]:
        """Fields of the record that options ask for. Collective over the world if there are any."""
        world = self.engine.mesh.group("world")
        fields: dict[str, Any] = {
            "num_zeros": self._window[-1].outcome.num_zeros,
            "times": self.times.read(len(self._window), world),
        }
        tags: dict[str, float] = {}
        for observer in self.observers:
            found = observer.numbers()
            fields |= found.fields
            tags |= found.tags
        return fields | {"tags": tags}

    def _layer_tokens(self, step: int, seq_length: int) -> int:
        """Tokens of one sequence, counted once for each block that sees them."""
        if self._kept is not None:
            return self._kept.layer_tokens(step, seq_length)
        return self.config.model.num_layers * seq_length

    def _record(self, size: int, trained: StepSize) -> TrainRecord:
        outcomes = [done.outcome for done in self._window]
        last = outcomes[-1]
        p = self.progress
        # Times and losses are means over the steps since the last line; other numbers are the last.
        seconds = statistics.fmean(
            done.outcome.seconds + done.data_seconds for done in self._window
        )
        ranks = self.engine.mesh.grid.world_size
        flops = statistics.fmean(done.flops for done in self._window) / seconds / ranks
        return TrainRecord(
            step=p.step,
            steps=self._total,
            samples=p.samples,
            tokens=p.tokens,
            step_seconds=seconds,
            learning_rate=last.learning_rate,
            decoupled_learning_rate=last.decoupled_learning_rate,
            weight_decay=last.weight_decay,
            global_batch_size=size,
            loss=statistics.fmean(o.loss for o in outcomes),
            loss_scale=last.loss_scale,
            grad_norm=last.grad_norm,
            skipped_steps=p.skipped_steps,
            nan_steps=p.nan_steps,
            seq_length=trained.length,
            tokens_per_second=statistics.fmean(done.tokens for done in self._window)
            / seconds,
            tflops_per_rank=flops / 1e12,
            mfu=utilization(flops, self._peak),
            eta_seconds=(self._total - p.step) * seconds,
            memory_gib=peak_memory_gib(self.engine.mesh.device),
            data_seconds=statistics.fmean(done.data_seconds for done in self._window),
            kept_tokens=trained.kept,
            kept_title="" if self._kept is None else self._kept.title,
            layer_tokens=p.layer_tokens,
            actual_seq_length=self._layer_tokens(p.step - 1, trained.length)
            // self.config.model.num_layers,
            metrics={
                name: statistics.fmean(
                    o.named[name] for o in outcomes if name in o.named
                )
                for name in last.named
            },
        )

    def _warn_of_stall(self, record: TrainRecord) -> None:
        """Warn once a run that steps wait for data."""
        share = record.data_seconds / record.step_seconds
        if share > STALLED and record.step > 1 and not self._has_warned_of_stall:
            self._has_warned_of_stall = True
            logger.warning(
                "%s",
                stall_text(
                    share, self.config.data.num_workers, self.config.data.mock_data
                ),
            )

    # ------------------------------------------------------------------ evaluation and checkpoints
    def evaluate(self, split: str) -> bool:
        """Evaluate on "validation" or "test" and log it; returns whether a rank asked to stop meanwhile."""
        train = self.config.train
        size = self.batch_size.final
        validation = split == "validation"
        # The position in the validation stream is a function of the step, as in Megatron. The step of a
        # loaded checkpoint may exceed the planned steps.
        step = min(self.progress.step, self._planned)
        rounds = (
            step // train.eval_interval - 1 if validation and train.eval_interval else 0
        )
        with (
            places.phase(places.EVALUATING),
            self.log.evaluating(split, train.eval_iters, size) as after_batch,
        ):
            result = evaluate(
                self.engine,
                self.loaders.valid if validation else self.loaders.test,
                first_sample=max(0, rounds) * train.eval_iters * size,
                iterations=train.eval_iters,
                global_batch_size=size,
                should_stop=self._wants_to_stop,
                after_batch=after_batch,
            )
        if validation:
            self._validated_step = self.progress.step
        if self.engine.mesh.rank == 0:
            self.log.write(
                EvalRecord(
                    self.progress.step,
                    self.progress.samples,
                    split,
                    result.loss,
                    result.seconds,
                    result.metrics,
                    self._is_of_tokens,
                )
            )
        for observer in self.observers:
            observer.evaluated(split, self.progress.step, result.loss)
        return result.stop

    def evaluate_tasks(self) -> None:
        """Evaluate --eval-tasks and log their metrics. Collective over the world."""
        start = time.perf_counter()
        # Rank 0 reads and prepares texts between the forwards, for minutes perhaps.
        with places.phase(places.READING):
            results = self.tasks.results()
        self._tasks_step = self.progress.step
        if self.engine.mesh.rank == 0:
            seconds = time.perf_counter() - start
            progress = self.progress
            self.log.write(
                TaskRecord(progress.step, progress.samples, results, seconds)
            )

    def _evaluate_everything(self) -> None:
        train = self.config.train
        if self.tasks and self._tasks_step != self.progress.step:
            self.evaluate_tasks()
        if not train.eval_iters:
            return
        if self.loaders.valid and self._validated_step != self.progress.step:
            self.evaluate("validation")
        if self.loaders.test:
            self.evaluate("test")


def stall_text(share: float, workers: int, mock: bool) -> str:
    """The warning that a fraction `share` of a step waits for data. workers: --num-workers."""
    if mock:
        return (
            f"{share:.0%} of a step is waiting for mock data, which is computed on the CPU: no disk is "
            f"read. A larger --num-workers (now {workers}) computes it ahead of the step. A real corpus "
            "has another share."
        )
    return (
        f"{share:.0%} of a step is waiting for data. A larger --num-workers (now {workers}) reads "
        "further ahead; if that does not help, the disk is the limit."
    )
