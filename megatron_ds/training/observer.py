"""`Observer`: an object whose methods are called at the moments of a run. Features have makers of them.

    run_started
    → (step_began → batch_read → around (the step itself) → step_ended → numbers, if a log line is due
       → evaluated, saved, …)*
    → run_ended → closed

All ranks make the same observers in the same order and call them at the same moments, so a method may communicate,
as long as it does so on every rank. An exception of a method ends the run as one of the step does.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from ..batch.batch import Batch
from ..config import RunConfig
from ..features import features
from ..progress.ramps import Progress
from .build import Replica


@dataclass(frozen=True)
class RunStart:
    """A run that starts, with its weights loaded.

    replica       the model and its optimizer on this rank, with the mesh
    progress      what the loaded checkpoint has consumed; zeros for a start from scratch
    note          function (fact): adds a `run_facts.Fact` to the sinks of rank 0
    request_stop  function (why): the run saves and stops after the step under way, as after a signal. One rank is
                  enough
    """

    config: RunConfig
    replica: Replica
    progress: Progress
    note: Callable[[Any], None]
    request_stop: Callable[[str], None]


@dataclass(frozen=True)
class StepEnd:
    """A step that ended. The numbers are equal on all ranks, but for the seconds.

    step       number of the step, from 1
    size       of its global batch, in samples
    samples    consumed since the start of the run
    tokens     of the step, over all ranks
    loss       mean over the global batch
    grad_norm  before clipping
    seconds    of the step, with the wait for its batch, on this rank
    skipped    whether the update was left out
    of_ranks   numbers that ranks shared with the reduction of the step, by rank; empty without any
    """

    step: int
    size: int
    samples: int
    tokens: int
    loss: float
    grad_norm: float
    seconds: float
    skipped: bool
    of_ranks: Sequence[float] = ()


@dataclass(frozen=True)
class Numbers:
    """What an observer adds to a log line. fields: of `TrainRecord`; tags: of TensorBoard alone."""

    fields: Mapping[str, Any] = field(default_factory=dict)
    tags: Mapping[str, float] = field(default_factory=dict)


class Observer:
    """The base class of observers. Its methods do nothing; override those that matter."""

    def run_started(self, start: RunStart) -> None:
        """Take note of the run before its first step."""

    def step_began(self, step: int) -> None:
        """Take note that step `step`, from 1, begins, before its batch is read."""

    def batch_read(self, step: int, batch: Batch) -> None:
        """Take note of this rank's share of the global batch, before the forward. Its time counts for the step."""

    def around(self, step: int) -> AbstractContextManager[Any]:
        """Return a context in which the forwards, backwards and the update of the step run."""
        return nullcontext()

    def step_ended(self, end: StepEnd) -> None:
        """Take note of a step after its update."""

    def numbers(self) -> Numbers:
        """Return what the log line of the step that ended has in addition. Called when one is due."""
        return Numbers()

    def evaluated(self, split: str, step: int, loss: float) -> None:
        """Take note of the mean loss on "validation" or "test" data after step `step`."""

    def saved(self, step: int) -> None:
        """Take note that the checkpoint of step `step` is complete: with --async-save some steps later."""

    def run_ended(self, reason: str) -> None:
        """Take note of the end, after the last save and evaluation. Not called after an error."""

    def closed(self) -> None:
        """Release what the observer holds, also after an error, which other ranks may not have."""


def observers_of(config: RunConfig) -> tuple[Observer, ...]:
    """Return the observers that features have for a run, in the order of the features."""
    made = (make(config) for feature in features() for make in feature.observers)
    return tuple(observer for observer in made if observer is not None)
