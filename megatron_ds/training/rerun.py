"""`Reruns`: a step with a bad result is computed again before its update (--rerun-bad-steps).

    bits as before                      deterministic   data, model, or a device that always fails so
    bits differ, a third run repeats
    one of the two                      transient       a fault of the hardware, on the ranks that are named
    three runs, three results           unrepeatable    operations that add in any order, or repeated faults

Nothing in a step is random: masks are functions of the samples. So the same micro-batches with the same weights
have the same loss and the same gradients, to the bit, where operations are deterministic. Compared are the losses
and the norm of all ranks, and the checksum of the gradient that each rank computed, before gradients are summed.
"""

import math
import socket
from collections.abc import Callable
from dataclasses import dataclass

from ..mpu.collectives import all_gather_object
from ..mpu.mesh import Mesh
from ..zero.gradient_checksum import GradientChecksum
from .step_metrics import StepReport

NOT_FINITE = "loss or gradient not finite"
SPIKE = "spike of the gradient norm"
SCHEDULED = "every step of --rerun-steps-interval"

DETERMINISTIC = "deterministic"
TRANSIENT = "transient"
UNREPEATABLE = "unrepeatable"


@dataclass(frozen=True)
class Computed:
    """What a forward and backward of a step leaves, the same on every rank, but for the gradients themselves.

    gradient: the numbers of `ZeroOptimizer.measure`, on the host
    """

    report: StepReport
    gradient: list[float]

    @property
    def bits(self) -> tuple[str, ...]:
        """All losses and numbers, exactly; NaN equals NaN."""
        report = self.report
        return tuple(
            map(float.hex, (report.loss, *report.terms.values(), *self.gradient))
        )


@dataclass(frozen=True)
class Rerun:
    """The comparison of the runs of one step.

    why      the step was computed again
    ranks    those whose own gradients differed, "3 (host)"
    losses, norms  of the first two runs; norms of the scaled sum of the gradients
    """

    why: str
    verdict: str
    ranks: tuple[str, ...]
    losses: tuple[float, float]
    norms: tuple[float, float]

    @property
    def is_news(self) -> bool:
        """Whether it is worth a line: not a scheduled comparison that found no difference."""
        return self.why != SCHEDULED or self.verdict != DETERMINISTIC


class Reruns:
    """Compares runs of a step.

    checksum  of the gradients of this rank
    interval  every so many steps are computed again whatever their result; None: only bad ones
    report    is called with what was found, before the update
    """

    def __init__(self, mesh: Mesh, checksum: GradientChecksum, interval: int | None):
        self.mesh = mesh
        self.checksum = checksum
        self.interval = interval
        self.report: Callable[[Rerun], None] = lambda rerun: None

    def is_due(self, step: int) -> bool:
        """Whether this step is computed again whatever its result."""
        return self.interval is not None and step % self.interval == 0

    def compare(
        self, first: Computed, again: Callable[[], Computed], why: str
    ) -> Computed:
        """Compute the step again, and report what was found. Returns the last run, whose gradients are kept.
        Collective over the world; the host waits for the device.

        first: the run whose gradients are kept now; again: computes the step once more
        """
        # A second run, and a third one where they differ. A result has the checksums of all ranks.
        runs = [first]
        sums = [int(self.checksum.total)]
        for _ in range(2):
            runs.append(again())
            sums.append(int(self.checksum.total))
            of_ranks = all_gather_object(
                (socket.gethostname(), sums), self.mesh.group("world")
            )
            results = [
                (run.bits, *(theirs[i] for _, theirs in of_ranks))
                for i, run in enumerate(runs)
            ]
            if results[-1] in results[:-1]:
                break
        # The ranks whose checksum is another one in the run that differs.
        verdict, odd, good = _verdict(results)
        ranks = tuple(
            f"{rank} ({host})"
            for rank, (host, theirs) in enumerate(of_ranks)
            if verdict == TRANSIENT and theirs[odd] != theirs[good]
        )
        self.report(
            Rerun(
                why,
                verdict,
                ranks,
                tuple(run.report.loss for run in runs[:2]),
                tuple(math.sqrt(run.gradient[0]) for run in runs[:2]),
            )
        )
        return runs[-1]


def _verdict(results: list[tuple]) -> tuple[str, int, int]:
    """(verdict, the run that differs from the others, one of the others)"""
    if len(results) == 2:
        return DETERMINISTIC, 0, 1
    if results[2] not in results[:2]:
        return UNREPEATABLE, 0, 2
    return TRANSIENT, 1 if results[2] == results[0] else 0, 2
