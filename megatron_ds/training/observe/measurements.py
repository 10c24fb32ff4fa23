"""What options of the log and of profiles measure: each is an `Observer` that its option switches on."""

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from ...batch.batch import Batch
from ...config import RunConfig
from ...mpu.group import Group
from ..observer import Numbers, Observer, RunStart, StepEnd
from ..replica_check import check_replicas
from .comms_log import make_log, seconds_of_groups, table_text
from .kernel_profile import KernelProfile
from .memory_history import MemoryHistory
from .noise_scale import NoiseScale, first_square
from .state_statistics import memory_tags, optimizer_states, params_norm
from .stragglers import Stragglers

logger = logging.getLogger(__name__)


class MemoryOfSteps(Observer):
    """--record-memory-history: bytes by owner, planned and measured."""

    def run_started(self, start: RunStart) -> None:
        """Begin to record."""
        self._note = start.note
        self._history = MemoryHistory(start.replica)

    @contextmanager
    def around(self, step: int) -> Iterator[None]:
        """Measure the step, if it is the one that is measured."""
        with self._history.step() as records:
            yield
        for record in records:
            self._note(record)

    def closed(self) -> None:
        """Write torch's record."""
        self._history.finish()


class ProfiledKernels(Observer):
    """--profile: what runs on host and device in a few steps."""

    def run_started(self, start: RunStart) -> None:
        """Prepare the profile."""
        replica = start.replica
        self._profile = KernelProfile(
            start.config.profiler, replica.executor, replica.mesh.rank
        )

    def around(self, step: int) -> AbstractContextManager[Any]:
        """Profile the step, if it is in the window."""
        return self._profile.step(step)

    def closed(self) -> None:
        """Write the trace of a window in which the run ended."""
        self._profile.finish()


class SlowRanks(Observer):
    """--straggler-report: ranks that compute slower than the others."""

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


class GradientNoise(Observer):
    """--grad-noise-scale: about the batch size from which a larger batch saves few steps."""

    def run_started(self, start: RunStart) -> None:
        """Begin the running estimate."""
        self._replica = start.replica
        self._wanted = start.config.profiler.grad_noise_scale_interval
        self._micro = start.config.train.micro_batch_size
        self._scale = NoiseScale()
        self._square: float | None = None
        self._parts = 1

    def batch_read(self, step: int, batch: Batch) -> None:
        """Measure the gradient of the first micro-batches, if it is due. Collective over the world."""
        self._square = None
        self._parts = batch.size // (batch.rows_per_sample * self._micro)
        if due(self._wanted, step) and self._parts > 1:
            self._square = first_square(self._replica, batch)

    def step_ended(self, end: StepEnd) -> None:
        """Compare it with the gradient of the whole batch."""
        if self._square is not None:
            small = end.size / self._parts
            self._scale.add(self._square, end.grad_norm**2, small, end.size)

    def numbers(self) -> Numbers:
        """Return the estimate."""
        return Numbers({"grad_noise_scale": self._scale.samples}, self._scale.tags())


class ComparedReplicas(Observer):
    """--check-weight-hash-across-dp-replicas-interval: do data-parallel ranks hold the same weights?"""

    def run_started(self, start: RunStart) -> None:
        """Keep what is compared."""
        self._replica = start.replica
        train = start.config.train
        self._interval = train.check_weight_hash_across_dp_replicas_interval

    def step_ended(self, end: StepEnd) -> None:
        """Compare the weights, if it is due. Collective over the world; raises ReplicaError on all ranks."""
        if due(self._interval, end.step):
            check_replicas(self._replica.optimizer, self._replica.mesh, end.step)


class CommunicationTable(Observer):
    """--comms-logger: a table of the messages of rank 0, at the end of the run."""

    def run_started(self, start: RunStart) -> None:
        """Begin to count messages."""
        self._mesh = mesh = start.replica.mesh
        self._log = make_log(start.config.profiler, mesh.rank, mesh.device)
        mesh.traffic.log = self._log

    def run_ended(self, reason: str) -> None:
        """Log the table, with the waits for slow ranks. Collective over the world."""
        self._report(self._mesh.group("world"))

    def closed(self) -> None:
        """Log the table of a run that failed, without comparing ranks."""
        self._report(None)

    def _report(self, world: Group | None) -> None:
        log = self._log
        self._log = None
        if log is None:
            return
        of_groups = None if world is None else seconds_of_groups(log, world)
        if self._mesh.rank == 0:
            logger.info("%s", table_text(log, self._mesh.rank, of_groups))


class StateNumbers(Observer):
    """Numbers of the weights, of the optimizer's state and of the memory, in each log line."""

    def run_started(self, start: RunStart) -> None:
        """Keep what they are computed from."""
        self._wanted = start.config.logging
        self._replica = start.replica

    def numbers(self) -> Numbers:
        """Compute what the options ask for. Collective over the world."""
        wanted = self._wanted
        mesh = self._replica.mesh
        optimizer = self._replica.optimizer
        fields: dict[str, Any] = {}
        tags: dict[str, float] = {}
        if wanted.log_params_norm:
            fields["params_norm"] = params_norm(optimizer, mesh)
        if wanted.log_optimizer_states_to_tensorboard:
            tags |= optimizer_states(optimizer, mesh)
        if wanted.log_memory_to_tensorboard:
            tags |= memory_tags(mesh.device)
        if wanted.log_world_size_to_tensorboard:
            tags["world-size"] = mesh.grid.world_size
        return Numbers(fields, tags)


# Observer → whether a configuration asks for it, in the order in which they are called. What is measured around a
# step is measured innermost by the last of them.
MEASUREMENTS: dict[type[Observer], Callable[[RunConfig], Any]] = {
    MemoryOfSteps: lambda config: config.profiler.record_memory_history,
    ProfiledKernels: lambda config: config.profiler.profile,
    SlowRanks: lambda config: config.logging.straggler_report,
    GradientNoise: lambda config: config.profiler.grad_noise_scale,
    ComparedReplicas: (
        lambda config: config.train.check_weight_hash_across_dp_replicas_interval
    ),
    CommunicationTable: lambda config: config.profiler.comms_logger,
    StateNumbers: lambda config: True,
}


def measurements(config: RunConfig) -> tuple[Observer, ...]:
    """Return the observers that options ask for."""
    return tuple(
        make() for make, is_wanted in MEASUREMENTS.items() if is_wanted(config)
    )


def due(interval: int | None, step: int) -> bool:
    """Return whether something that happens every `interval` steps follows this step."""
    return bool(interval) and step % interval == 0
