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
from dataclasses import dataclass

from ...config.training_schedule import make_batch_size
from ...mpu.collectives import all_gather_object
from ...mpu.mesh import Mesh
from ...training.moments import Again, Computed, RunStart
from ...training.observer import FIRST, Observer, due
from ...zero.gradient_checksum import GradientChecksum
from .rerun_record import RerunRecord

NOT_FINITE = "loss or gradient not finite"
SCHEDULED = "every step of --rerun-steps-interval"

DETERMINISTIC = "deterministic"
TRANSIENT = "transient"
UNREPEATABLE = "unrepeatable"
MOST_RUNS = 3


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


class Comparison:
    """The runs of one step.

    why       it is computed again
    checksum  of the gradients of this rank
    """

    def __init__(self, why: str, mesh: Mesh, checksum: GradientChecksum):
        self.why = why
        self._world = mesh.group("world")
        self._checksum = checksum
        self._runs: list[Computed] = []
        self._sums: list[int] = []

    def add(self, computed: Computed) -> Rerun | None:
        """Add the run whose gradients are kept now. Returns the result of the comparison; None: run once more.

        Collective over the world, but for the first run; the host waits for the device.
        """
        self._runs.append(computed)
        self._sums.append(int(self._checksum.total))
        return self._compared() if len(self._runs) > 1 else None

    def _compared(self) -> Rerun | None:
        """Return the result where a run repeats another, or after the third one. Collective over the world."""
        runs = self._runs
        of_ranks = all_gather_object((socket.gethostname(), self._sums), self._world)
        # A result has the checksums of all ranks.
        results = [
            (run.bits, *(theirs[i] for _, theirs in of_ranks))
            for i, run in enumerate(runs)
        ]
        if results[-1] not in results[:-1] and len(runs) < MOST_RUNS:
            return None
        # The ranks whose checksum is another one in the run that differs.
        verdict, odd, good = _verdict(results)
        ranks = tuple(
            f"{rank} ({host})"
            for rank, (host, theirs) in enumerate(of_ranks)
            if verdict == TRANSIENT and theirs[odd] != theirs[good]
        )
        first, second = runs[:2]
        return Rerun(
            self.why,
            verdict,
            ranks,
            (first.report.loss, second.report.loss),
            (math.sqrt(first.gradient[0]), math.sqrt(second.gradient[0])),
        )


class Reruns(Observer):
    """--rerun-bad-steps: asks for another run of a bad step, and reports what the comparison finds."""

    place = FIRST

    def run_started(self, start: RunStart) -> None:
        """Keep what decides about a step."""
        self._start = start
        self._interval = start.config.train.rerun_steps_interval
        self._batch_size = make_batch_size(start.config)
        self._comparison: Comparison | None = None

    def computed(self, computed: Computed) -> Again | None:
        """Compare the runs of a bad step. Collective over the world after a rerun; the host waits for the device."""
        comparison = self._comparison or self._begun(computed)
        if comparison is None:
            return None
        found = comparison.add(computed)
        self._comparison = comparison if found is None else None
        if found is None:
            return Again(comparison.why)
        if found.is_news:
            self._report(computed, found)
        return None

    def _begun(self, computed: Computed) -> Comparison | None:
        """Return the comparison of a step that is computed again; None: once is enough. The same on all ranks."""
        replica = self._start.replica
        why = self._why(computed)
        checksum = replica.optimizer.checksum
        if why is None or checksum is None:
            return None
        return Comparison(why, replica.mesh, checksum)

    def _why(self, computed: Computed) -> str | None:
        is_finite = computed.report.is_finite and math.isfinite(computed.norm)
        if not is_finite and not self._start.replica.seeks_loss_scale:
            return NOT_FINITE
        if computed.drop is not None:
            return computed.drop.why
        step = computed.progress.step + 1
        return SCHEDULED if due(self._interval, step) else None

    def _report(self, computed: Computed, found: Rerun) -> None:
        before = computed.progress
        self._start.write(
            RerunRecord(
                before.step + 1,
                before.samples + self._batch_size(before),
                found.why,
                found.verdict,
                found.ranks,
                *found.losses,
                *found.norms,
            )
        )


def _verdict(results: list[tuple]) -> tuple[str, int, int]:
    """(verdict, the run that differs from the others, one of the others)"""
    if len(results) == 2:
        return DETERMINISTIC, 0, 1
    if results[2] not in results[:2]:
        return UNREPEATABLE, 0, 2
    return TRANSIENT, 1 if results[2] == results[0] else 0, 2
