"""The values that observers receive at the moments of a run, and those with which they answer.

receive   RunStart  Computed  StepEnd
answer    Again  Drop  Stop  Numbers
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..config import RunConfig
from ..progress.ramps import Progress
from .build import Replica
from .loaders import Loaders
from .step_metrics import StepReport
from .step_size import StepSize


@dataclass(frozen=True)
class RunStart:
    """A run that starts, with its weights loaded.

    replica       the model and its optimizer on this rank, with the mesh
    loaders       its data
    progress      what the loaded checkpoint has consumed; zeros for a start from scratch
    began         time.monotonic() at the start of the process
    write         function (record): writes it to the console and to the sinks, on rank 0; nothing on other ranks
    note          function (fact): adds a `run_facts.RunFact` to metrics.jsonl, on rank 0
    request_stop  function (why): the run saves and stops after the step under way, as after a signal. One rank is
                  enough
    """

    config: RunConfig
    replica: Replica
    loaders: Loaders
    progress: Progress
    began: float
    write: Callable[[Any], None]
    note: Callable[[Any], None]
    request_stop: Callable[[str], None]


@dataclass(frozen=True)
class Drop:
    """The answer that the update of a step is left out."""

    why: str


@dataclass(frozen=True)
class Again:
    """The answer that the forwards and backwards of a step run once more, before its update."""

    why: str


@dataclass(frozen=True)
class Stop:
    """The answer that the run stops. reason: of its end, for the log"""

    reason: str


@dataclass(frozen=True)
class Computed:
    """What the forwards and backwards of a step leave, the same on every rank, but for the gradients themselves.

    progress  before the step
    gradient  the numbers of `ZeroOptimizer.measure`, on the host
    norm      of the gradient, unscaled and before clipping
    drop      why an observer will leave out the update, if this is the last run of the step
    """

    progress: Progress
    report: StepReport
    gradient: Sequence[float]
    norm: float
    drop: Drop | None = None

    @property
    def bits(self) -> tuple[str, ...]:
        """All losses and numbers, exactly; NaN equals NaN."""
        report = self.report
        return tuple(
            map(float.hex, (report.loss, *report.terms.values(), *self.gradient))
        )


@dataclass(frozen=True, kw_only=True)
class StepEnd:
    """A step that ended. The numbers are equal on all ranks, but for the seconds.

    step          number of the step, from 1
    size          of its global batch, in samples
    samples       consumed since the start of the run
    tokens        of the step, over all ranks
    loss          mean over the global batch
    grad_norm     before clipping
    seconds       of the step, with the wait for its batch, on this rank
    skipped       whether the update was left out
    of_ranks      numbers that ranks shared with the reduction of the step, by rank; empty without any
    data_seconds  the wait for its batch
    flops         of the model, over all ranks
    trained       what the step has trained on
    dropped       why an observer left the update out
    """

    step: int
    size: int
    samples: int
    tokens: int
    loss: float
    grad_norm: float
    seconds: float
    skipped: bool
    of_ranks: Sequence[float]
    data_seconds: float
    flops: float
    trained: StepSize
    dropped: Drop | None


@dataclass(frozen=True)
class Numbers:
    """What an observer adds to a log line. fields: of `TrainRecord`; tags: of TensorBoard alone."""

    fields: Mapping[str, Any] = field(default_factory=dict)
    tags: Mapping[str, float] = field(default_factory=dict)
