"""`Observer`: an object whose methods are called at the moments of a run. Features have makers of them.

    built → loaded → run_started
    → (step_began → batch_read
       → around: phase "forward-backward" → computed (→ Again: once more) → phase "optimizer": update_checked
       → step_ended → numbers, if a log line is due → step_logged
       → evaluated → between_steps → saved → waited_for_save)*
    → trained → evaluated → run_ended → closed

All ranks make the same observers in the same order and call them at the same moments, so a method may communicate,
as long as it does so on every rank. An exception of a method ends the run as one of the step does. Four methods
decide by what they return, which must be the same on all ranks: `computed`, `update_checked`, `step_ended` and
`numbers`.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ..batch.batch import Batch
from ..data.tokenizers import Tokenizer
from ..progress.ramps import Progress
from .build import Replica
from .moments import Again, Computed, Drop, Numbers, RunStart, StepEnd, Stop
from .observe.records import TrainRecord

# Places of observers: what decides about a step comes first, and what measures it is innermost around it.
FIRST = -1
LAST = 1


class Observer:
    """The base class of observers. Its methods do nothing; override those that matter.

    place: in the order in which observers are called, the lowest first, where they are made in another order
    """

    place = 0

    def built(self, replica: Replica) -> None:
        """Take note of the model before a checkpoint is loaded.

        An object that is put into `replica.states` has its state in run.json, and has it again after loading.
        """

    def loaded(self, replica: Replica, tokenizer: Tokenizer) -> None:
        """Read what the run needs besides its data, with the weights loaded: an error still costs nothing."""

    def run_started(self, start: RunStart) -> None:
        """Take note of the run before its first step."""

    def step_began(self, step: int) -> None:
        """Take note that step `step`, from 1, begins, before its batch is read."""

    def batch_read(self, step: int, batch: Batch) -> None:
        """Take note of this rank's share of the global batch, before the forward. Its time counts for the step."""

    def around(self, step: int) -> AbstractContextManager[Any]:
        """Return a context in which the forwards, backwards and the update of the step run."""
        return nullcontext()

    def phase(self, name: str) -> AbstractContextManager[Any]:
        """Return a context for a part of the step: "forward-backward" or "optimizer"."""
        return nullcontext()

    def computed(self, computed: Computed) -> Again | None:
        """Return why the step is computed again before its update; None: it is not. Asked after each time."""
        return None

    def update_checked(self, norm: float) -> Drop | None:
        """Return why the update is left out at this norm of the gradient; None: it is made. Changes nothing: it is
        asked several times in a step."""
        return None

    def step_ended(self, end: StepEnd) -> Stop | None:
        """Take note of a step after its update. Returns why the run stops after it; None: it goes on."""
        return None

    def numbers(self) -> Numbers:
        """Return what the log line of the step that ended has in addition. Called when one is due."""
        return Numbers()

    def step_logged(self, step: int, record: TrainRecord | None) -> None:
        """Take note that the step is complete. record: of the line that rank 0 wrote after it; None without one, and
        on other ranks."""

    def between_steps(self, progress: Progress) -> None:
        """Do what follows this step, after the run's own evaluation and before a checkpoint."""

    def evaluated(self, split: str, step: int, loss: float) -> None:
        """Take note of the mean loss on "validation" or "test" data after step `step`."""

    def saved(self, step: int) -> None:
        """Take note that the checkpoint of step `step` is complete: with --async-save some steps later."""

    def waited_for_save(self, step: int, seconds: float) -> None:
        """Take note for how many seconds steps waited for the checkpoint of step `step`, after `saved`."""

    def trained(self, progress: Progress) -> None:
        """Do what follows the last step of a complete run, after its save and before its evaluation."""

    def run_ended(self, reason: str) -> None:
        """Take note of the end, after the last save and evaluation. Not called after an error."""

    def closed(self) -> None:
        """Release what the observer holds, also after an error, which other ranks may not have."""


def due(interval: int | None, step: int) -> bool:
    """Return whether something that happens every `interval` steps follows this step."""
    return bool(interval and step % interval == 0)
