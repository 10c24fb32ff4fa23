"""`Observers`: the observers of a run as one, which calls each of them in order at every moment.

    answers             what becomes of them
    computed            the first Again
    update_checked      the first Drop
    step_ended          the first Stop
    numbers             all; of equal names the last
    around, phase       the first observer is outermost
    closed              those that have started, the last one first, each also if another one fails

Every observer is asked, also after another one's answer.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

from ..batch.batch import Batch
from ..config import RunConfig
from ..data.tokenizers import Tokenizer
from ..features import features
from ..progress.ramps import Progress
from .build import Replica
from .moments import Again, Computed, Drop, Numbers, RunStart, StepEnd, Stop
from .observe.data_stalls import DataStalls
from .observe.facts import Facts
from .observe.ran_kernels import RanKernels
from .observe.records import TrainRecord
from .observer import Observer

T = TypeVar("T")


class Observers(Observer):
    """All observers of a run."""

    def __init__(self, observers: Iterable[Observer]):
        self._all = tuple(observers)
        self._started: list[Observer] = []

    def built(self, replica: Replica) -> None:
        """Call each."""
        for observer in self._all:
            observer.built(replica)

    def loaded(self, replica: Replica, tokenizer: Tokenizer) -> None:
        """Call each."""
        for observer in self._all:
            observer.loaded(replica, tokenizer)

    def run_started(self, start: RunStart) -> None:
        """Call each. Those that have started are closed in any case."""
        for observer in self._all:
            observer.run_started(start)
            self._started.append(observer)

    def step_began(self, step: int) -> None:
        """Call each."""
        for observer in self._all:
            observer.step_began(step)

    def batch_read(self, step: int, batch: Batch) -> None:
        """Call each."""
        for observer in self._all:
            observer.batch_read(step, batch)

    @contextmanager
    def around(self, step: int) -> Iterator[None]:
        """Enter the contexts of all."""
        with ExitStack() as contexts:
            for observer in self._all:
                contexts.enter_context(observer.around(step))
            yield

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Enter the contexts of all."""
        with ExitStack() as contexts:
            for observer in self._all:
                contexts.enter_context(observer.phase(name))
            yield

    def computed(self, computed: Computed) -> Again | None:
        """Ask each. Returns the first Again."""
        return self._first(lambda observer: observer.computed(computed))

    def update_checked(self, norm: float) -> Drop | None:
        """Ask each. Returns the first Drop."""
        return self._first(lambda observer: observer.update_checked(norm))

    def step_ended(self, end: StepEnd) -> Stop | None:
        """Ask each. Returns the first Stop."""
        return self._first(lambda observer: observer.step_ended(end))

    def _first(self, ask: Callable[[Observer], T | None]) -> T | None:
        answers = [ask(observer) for observer in self._all]
        return next((answer for answer in answers if answer is not None), None)

    def numbers(self) -> Numbers:
        """Join the numbers of all."""
        fields: dict[str, Any] = {}
        tags: dict[str, float] = {}
        for observer in self._all:
            found = observer.numbers()
            fields |= found.fields
            tags |= found.tags
        return Numbers(fields, tags)

    def step_logged(self, step: int, record: TrainRecord | None) -> None:
        """Call each."""
        for observer in self._all:
            observer.step_logged(step, record)

    def between_steps(self, progress: Progress) -> None:
        """Call each."""
        for observer in self._all:
            observer.between_steps(progress)

    def evaluated(self, split: str, step: int, loss: float) -> None:
        """Call each."""
        for observer in self._all:
            observer.evaluated(split, step, loss)

    def saved(self, step: int) -> None:
        """Call each."""
        for observer in self._all:
            observer.saved(step)

    def waited_for_save(self, step: int, seconds: float) -> None:
        """Call each."""
        for observer in self._all:
            observer.waited_for_save(step, seconds)

    def trained(self, progress: Progress) -> None:
        """Call each."""
        for observer in self._all:
            observer.trained(progress)

    def run_ended(self, reason: str) -> None:
        """Call each."""
        for observer in self._all:
            observer.run_ended(reason)

    def closed(self) -> None:
        """Close those that have started."""
        with ExitStack() as closing:
            for observer in self._started:
                closing.callback(observer.closed)


def observers_of(config: RunConfig) -> Observers:
    """Return the observers of a run: those that every run has, around those of features."""
    made = (make(config) for feature in features() for make in feature.observers)
    of_features = [observer for observer in made if observer is not None]
    of_features.sort(key=lambda observer: observer.place)
    return Observers([Facts(), *of_features, RanKernels(), DataStalls()])
