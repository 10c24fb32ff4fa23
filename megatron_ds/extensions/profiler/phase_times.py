"""`PhaseTimes`: times of the parts of a step under Megatron's names, between two log lines.

    level 0   none beside the time of a step
    level 1   forward-backward, optimizer
    level 2   also forward-compute, backward-compute, forward-recv, …: the pipeline's instructions

On GPUs they are events on the stream. The host waits for them, and ranks exchange them, only when a log line
is written.
"""

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from ...mpu.collectives import all_gather_object
from ...mpu.group import Group
from ...pipeline.executor import Executor
from ...pipeline.instruction import Op
from ...pipeline.timeline import Timeline
from ...training.moments import Numbers, RunStart, StepEnd
from ...training.observe.records import TrainRecord
from ...training.observer import FIRST, Observer

logger = logging.getLogger(__name__)

NAMES = {
    Op.F: "forward-compute",
    Op.B: "backward-compute",
    Op.I: "backward-compute",
    Op.W: "backward-compute",
    Op.RECV_ACT: "forward-recv",
    Op.SEND_ACT: "forward-send",
    Op.RECV_GRAD: "backward-recv",
    Op.SEND_GRAD: "backward-send",
    Op.TIE: "embedding-grads-all-reduce",
    Op.GATHER: "params-all-gather",
}
PARTS = {"forward-backward", "optimizer"}  # of level 1


class PhaseTimes:
    """Times of one rank since the last `read`. level: --timing-log-level."""

    def __init__(self, level: int, device: torch.device):
        self.level = level
        self._timeline = Timeline(device) if level else None
        self._waits = 0.0
        self._added: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """The time of this context is one of the phase `name`."""
        if self._timeline is None:
            yield
            return
        start = self._timeline.now()
        yield
        self._timeline.add(name, start)  # type: ignore[arg-type]  # it keeps any name

    @contextmanager
    def instructions(self, executor: Executor) -> Iterator[None]:
        """Inside, the executor's instructions are timed, unless a trace records them."""
        if self.level < 2 or executor.timeline is not None:
            yield
            return
        executor.timeline = self._timeline
        try:
            yield
        finally:
            executor.timeline = None

    def wait(self, seconds: float) -> None:
        """Count a wait for data."""
        self._waits += seconds if self.level == 2 else 0.0

    def add(self, seconds: Mapping[str, float]) -> None:
        """Count the times of a step that another timer has taken."""
        known = PARTS if self.level == 1 else seconds
        for name in seconds.keys() & known if self.level else ():
            self._added[name] = self._added.get(name, 0.0) + seconds[name]

    def read(self, steps: int, world: Group) -> dict[str, dict[int, float]]:
        """Phase → rank → seconds per step, of each rank that had it. Collective over the world, if the level
        is not 0; the host waits for the device."""
        return of_ranks(self.take(), steps, world) if self.level else {}

    def take(self) -> dict[str, float]:
        """Phase → seconds of this rank since the last call; the host waits for the device."""
        mine: dict[str, float] = defaultdict(float, self._added)
        self._added = {}
        entries = () if self._timeline is None else self._timeline.read()
        for what, start, end in entries:
            name = what if isinstance(what, str) else NAMES.get(what.op)
            if name is not None:
                mine[name] += end - start
        if self._waits:
            mine["batch-generator"] = self._waits
        self._waits = 0.0
        return dict(mine)


def of_ranks(
    mine: Mapping[str, float], steps: int, world: Group
) -> dict[str, dict[int, float]]:
    """Phase → rank → seconds per step, of each rank that had it. Collective over the world."""
    ranks: dict[str, dict[int, float]] = defaultdict(dict)
    for rank, times in enumerate(all_gather_object(dict(mine), world)):
        for name, seconds in times.items():
            ranks[name][rank] = seconds / steps
    return dict(ranks)


def times_text(times: Mapping[str, Mapping[int, float]], option: str) -> str:
    """Return the times of `PhaseTimes.read` in milliseconds, in Megatron's format. option: --timing-log-option."""
    if option == "all":
        lines = ["times across ranks (ms):"]
        for name, values in times.items():
            lines.append(f"  {name}:")
            for rank, seconds in values.items():
                lines.append(f"     rank {rank:2d}: {seconds * 1000:.2f}")
        return "\n".join(lines)
    # One line for each phase: its extremes over the ranks.
    title = (
        "max time across ranks (ms):"
        if option == "max"
        else "(min, max) time across ranks (ms):"
    )
    lines = [title]
    for name, values in times.items():
        least = min(values.values()) * 1000
        most = max(values.values()) * 1000
        number = f"{most:.2f}" if option == "max" else f"({least:.2f}, {most:.2f})"
        lines.append(f"    {(name + ' ').ljust(48, '.')}: {number}")
    return "\n".join(lines)


class TimedPhases(Observer):
    """--timing-log-level: the phases of steps, in each log line and below it."""

    place = FIRST

    def run_started(self, start: RunStart) -> None:
        """Begin to measure."""
        logging_options = start.config.logging
        self._option = logging_options.timing_log_option
        self._mesh = start.replica.mesh
        self._executor = start.replica.executor
        self._times = PhaseTimes(logging_options.timing_log_level, self._mesh.device)
        self._steps = 0

    @property
    def running(self) -> PhaseTimes:
        """What times the step under way."""
        return self._times

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the phase, and the instructions in it."""
        times = self.running
        with times.phase(name), times.instructions(self._executor):
            yield

    def step_ended(self, end: StepEnd) -> None:
        """Count the step and its wait for data."""
        self._steps += 1
        self._times.wait(end.data_seconds)

    def numbers(self) -> Numbers:
        """Return the times since the last line. Collective over the world, if there are any; the host waits for the
        device."""
        times = self._times.read(self._steps, self._mesh.group("world"))
        self._steps = 0
        return Numbers({"times": times})

    def step_logged(self, step: int, record: TrainRecord | None) -> None:
        """Log the times in Megatron's format below the line."""
        if record is not None and record.times:
            logger.info("%s", times_text(record.times, self._option))
