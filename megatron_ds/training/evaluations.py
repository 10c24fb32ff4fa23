"""`Evaluations`: when a run is evaluated on held-out samples, on which ones, and what the log has of it."""

from ..config.training_schedule import make_batch_size
from ..host import places
from ..planning.training_length import make_length
from ..progress.ramps import Progress
from .batches import BatchSource
from .build import Replica
from .loaders import Loaders
from .observe.log import Log
from .observe.records import EvalRecord
from .observer import Observer, due
from .step import evaluate
from .stopping import Stopping

VALIDATION = "validation"
TEST = "test"


class Evaluations:
    """The evaluations of one run."""

    def __init__(
        self,
        replica: Replica,
        loaders: Loaders,
        log: Log,
        observer: Observer,
        stopping: Stopping,
    ):
        self._engine = replica
        self._loaders = loaders
        self._log = log
        self._observer = observer
        self._stopping = stopping
        self._train = replica.config.train
        self._size = make_batch_size(replica.config).final
        self._planned = make_length(replica.config).steps_after()
        objective = replica.config.objective
        self._is_of_tokens = objective is None or objective.is_of_tokens
        self._validated_step = -1

    def after_step(self, progress: Progress) -> bool:
        """Evaluate on validation data, if it is due. Returns whether a rank asked to stop meanwhile. Collective."""
        loader = self._loaders.valid
        is_due = self._train.eval_iters and due(
            self._train.eval_interval, progress.step
        )
        if loader is None or not is_due:
            return False
        return self._validate(loader, progress)

    def at_end(self, progress: Progress) -> None:
        """Evaluate a complete run on all held-out data. Collective over the world."""
        if not self._train.eval_iters:
            return
        valid = self._loaders.valid
        if valid is not None and self._validated_step != progress.step:
            self._validate(valid, progress)
        if self._loaders.test is not None:
            self._evaluate(TEST, self._loaders.test, 0, progress)

    def _validate(self, loader: BatchSource, progress: Progress) -> bool:
        # The position in the validation stream is a function of the step, as in Megatron. The step of a
        # loaded checkpoint may exceed the planned steps.
        step = min(progress.step, self._planned)
        interval = self._train.eval_interval
        rounds = step // interval - 1 if interval else 0
        first = max(0, rounds) * self._train.eval_iters * self._size
        stops = self._evaluate(VALIDATION, loader, first, progress)
        self._validated_step = progress.step
        return stops

    def _evaluate(
        self, split: str, loader: BatchSource, first: int, progress: Progress
    ) -> bool:
        """Evaluate and log. Returns whether a rank asked to stop meanwhile. first: position of the first sample"""
        iterations = self._train.eval_iters
        with (
            places.phase(places.EVALUATING),
            self._log.evaluating(split, iterations, self._size) as after_batch,
        ):
            result = evaluate(
                self._engine,
                loader,
                first_sample=first,
                iterations=iterations,
                global_batch_size=self._size,
                should_stop=self._stopping.is_asked,
                after_batch=after_batch,
            )
        # The record, on rank 0.
        if self._engine.mesh.rank == 0:
            self._log.write(
                EvalRecord(
                    progress.step,
                    progress.samples,
                    split,
                    result.loss,
                    result.seconds,
                    result.metrics,
                    self._is_of_tokens,
                )
            )
        self._observer.evaluated(split, progress.step, result.loss)
        return result.stop
