"""`Observer`: an object whose methods are called at the moments of a run. Features have makers of them.

    run_started → (step_began → step_ended → (evaluated | saved)*)* → run_ended

All ranks make the same observers in the same order and call them at the same moments, so a method may communicate,
as long as it does so on every rank. An exception of a method ends the run as one of the step does.
"""

from collections.abc import Callable
from dataclasses import dataclass

from ..config import RunConfig
from ..features import features
from ..progress.ramps import Progress
from .build import Replica


@dataclass(frozen=True)
class RunStart:
    """A run that starts, with its weights loaded.

    replica       the model and its optimizer on this rank, with the mesh
    progress      what the loaded checkpoint has consumed; zeros for a start from scratch
    request_stop  function (why): the run saves and stops after the step under way, as after a signal. One rank is
                  enough
    """

    config: RunConfig
    replica: Replica
    progress: Progress
    request_stop: Callable[[str], None]


@dataclass(frozen=True)
class StepEnd:
    """A step that ended. The numbers are equal on all ranks.

    step       number of the step, from 1
    samples    consumed since the start of the run
    tokens     of the step, over all ranks
    loss       mean over the global batch
    grad_norm  before clipping
    seconds    of the step, with the wait for its batch, on this rank
    skipped    whether the update was left out
    """

    step: int
    samples: int
    tokens: int
    loss: float
    grad_norm: float
    seconds: float
    skipped: bool


class Observer:
    """The base class of observers. Its methods do nothing; override those that matter."""

    def run_started(self, start: RunStart) -> None:
        """Take note of the run before its first step."""

    def step_began(self, step: int) -> None:
        """Take note that step `step`, from 1, begins, before its batch is read."""

    def step_ended(self, end: StepEnd) -> None:
        """Take note of a step after its update."""

    def evaluated(self, split: str, step: int, loss: float) -> None:
        """Take note of the mean loss on "validation" or "test" data after step `step`."""

    def saved(self, step: int) -> None:
        """Take note that the checkpoint of step `step` is complete: with --async-save some steps later."""

    def run_ended(self, reason: str) -> None:
        """Take note of the end, after the last save and evaluation. Not called after an error."""


def observers_of(config: RunConfig) -> tuple[Observer, ...]:
    """Return the observers that features have for a run, in the order of the features."""
    made = (make(config) for feature in features() for make in feature.observers)
    return tuple(observer for observer in made if observer is not None)
