"""`Stragglers`: ranks that compute slower than the others, named while the run goes on (--straggler-report).

Every N steps each rank measures its computation: on CPUs the time of the step without its waits for other ranks, on
GPUs the time of the pipeline's computations on the device. The next step's reduction of metrics carries the numbers
of all ranks, so there is no further collective. Ranks of one pipeline stage have the same work: a rank is compared
with the median of its stage.
"""

import logging
import platform
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from ...host.places import waited_seconds
from ...mpu.collectives import all_gather_object
from ...mpu.mesh import Mesh
from ...pipeline.executor import Executor
from ...pipeline.instruction import COMPUTE
from ...pipeline.timeline import Timeline
from ...training.moments import RunStart, StepEnd
from ...training.observer import LAST, Observer

SLOW = 1.2  # times the median
FEWEST = 3  # ranks of a stage; with fewer, a rank is compared with all
MOST_NAMED = 8
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Straggler:
    """A slow rank. ratio: of its time of computation to the median"""

    rank: int
    seconds: float
    ratio: float


def slow_ranks(seconds: Sequence[float], stages: Sequence[int]) -> list[Straggler]:
    """Return the ranks that take more than SLOW times the median of their stage, the slowest first.

    seconds: of each rank, 0 where it is not known; stages: the pipeline rank of each
    """
    found = []
    for rank, mine in enumerate(seconds):
        peers = [
            other
            for other, stage in zip(seconds, stages)
            if other and stage == stages[rank]
        ]
        if len(peers) < FEWEST:
            peers = [other for other in seconds if other]
        if mine and mine > SLOW * (median := statistics.median_low(peers)):
            found.append(Straggler(rank, mine, mine / median))
    return sorted(found, key=lambda one: -one.ratio)


def stragglers_text(
    step: int, seconds: Sequence[float], slow: Sequence[Straggler], hosts: Sequence[str]
) -> str:
    """Return the line of a report."""
    known = [one for one in seconds if one]
    median = statistics.median_low(known) if known else 0.0
    named = [
        f"rank {one.rank} on {hosts[one.rank]} takes {one.ratio:.2f} times the median ({one.seconds * 1e3:.1f} ms)"
        for one in slow[:MOST_NAMED]
    ]
    if len(slow) > MOST_NAMED:
        named.append(f"and {len(slow) - MOST_NAMED} more ranks")
    what = "; ".join(named) or f"no rank takes more than {SLOW:g} times the median"
    return f"computation in iteration {step}, median {median * 1e3:.1f} ms: {what}"


class Stragglers:
    """Measures this rank, and reports all. interval: steps between two reports, None for none"""

    def __init__(self, interval: int | None, mesh: Mesh):
        self._interval = interval
        self._mesh = mesh
        self._seconds: float | None = None
        self._hosts: list[str] = []
        is_cuda = mesh.device.type == "cuda"
        self._timeline = Timeline(mesh.device) if interval and is_cuda else None

    def take(self) -> float | None:
        """Return the seconds that were measured in the last step, for the reduction of this one; None without any."""
        seconds = self._seconds
        self._seconds = None
        return seconds

    @contextmanager
    def measured(self, step: int, executor: Executor) -> Iterator[None]:
        """Measure the step inside, if it is due."""
        if not self._interval or step % self._interval:
            yield
            return
        if self._timeline is not None:
            with self._on_device(executor, self._timeline):
                yield
            return
        begin = time.perf_counter()
        waited = waited_seconds()
        yield
        self._seconds = time.perf_counter() - begin - (waited_seconds() - waited)

    def report(self, step: int, seconds: Sequence[float]) -> None:
        """Log the slow ranks of a step. seconds: of all ranks. The first report is collective over the world."""
        mesh = self._mesh
        if not self._hosts:
            self._hosts = all_gather_object(platform.node(), mesh.group("world"))
        if mesh.rank:
            return
        ranks = range(len(seconds))
        slow = slow_ranks(
            seconds, [mesh.grid.coordinates(rank)["pp"] for rank in ranks]
        )
        log = logger.warning if slow else logger.info
        log("%s", stragglers_text(step, seconds, slow, self._hosts))

    @contextmanager
    def _on_device(self, executor: Executor, timeline: Timeline) -> Iterator[None]:
        """Time the computations of the device, unless a trace records them."""
        if executor.timeline is not None:
            self._seconds = 0.0
            yield
            return
        executor.timeline = timeline
        try:
            yield
        finally:
            executor.timeline = None
        times = [
            end - start for what, start, end in timeline.read() if what.op in COMPUTE
        ]
        self._seconds = sum(times, 0.0)


class SlowRanks(Observer):
    """--straggler-report: ranks that compute slower than the others."""

    place = LAST

    def run_started(self, start: RunStart) -> None:
        """Prepare the measurement."""
        self._replica = start.replica
        interval = start.config.logging.straggler_report
        self._stragglers = Stragglers(interval, start.replica.mesh)
        self._own: float | None = None

    def around(self, step: int) -> AbstractContextManager[Any]:
        """Measure the step, if a report is due. Its reduction shares what was measured in the last one."""
        self._own = self._stragglers.take()
        self._replica.metrics.share(self._own)
        return self._stragglers.measured(step, self._replica.executor)

    def step_ended(self, end: StepEnd) -> None:
        """Name the slow ranks of the step that was measured."""
        if self._own is not None:
            self._stragglers.report(end.step - 1, end.of_ranks)
