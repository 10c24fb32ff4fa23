"""`TasksOfRun`: evaluates --eval-tasks while a model is trained."""

import time

from ...data.tokenizers import Tokenizer
from ...host import places
from ...progress.ramps import Progress
from ...training.build import Replica
from ...training.moments import RunStart
from ...training.observer import Observer, due
from .harness import harness_of_run
from .task_record import TaskRecord


class TasksOfRun(Observer):
    """Loads the tasks once, and evaluates them every --eval-tasks-interval steps and at the end."""

    def loaded(self, replica: Replica, tokenizer: Tokenizer) -> None:
        """Load the tasks. Collective over the world."""
        self._harness = harness_of_run(replica, tokenizer)
        self._interval = replica.config.train.eval_tasks_interval
        self._evaluated_step = -1

    def run_started(self, start: RunStart) -> None:
        """Keep where results are logged."""
        self._write = start.write

    def between_steps(self, progress: Progress) -> None:
        """Evaluate, if it is due."""
        if due(self._interval, progress.step):
            self._evaluate(progress)

    def trained(self, progress: Progress) -> None:
        """Evaluate the trained model, unless that has been done."""
        if self._evaluated_step != progress.step:
            self._evaluate(progress)

    def _evaluate(self, progress: Progress) -> None:
        """Evaluate and log the metrics. Collective over the world."""
        start = time.perf_counter()
        # Rank 0 reads and prepares texts between the forwards, for minutes perhaps.
        with places.phase(places.READING):
            results = self._harness.results()
        self._evaluated_step = progress.step
        seconds = time.perf_counter() - start
        self._write(TaskRecord(progress.step, progress.samples, results, seconds))
