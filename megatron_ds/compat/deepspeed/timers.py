"""`deepspeed.utils.timer`: timers that programs start and stop themselves. They synchronise with the device,
as DeepSpeed's do; the engine uses none.
"""

import time
from collections.abc import Callable, Sequence

from .accelerator import get_accelerator
from .utils import log_dist


class DeviceTimer:
    """The time between `start` and `stop`, in milliseconds."""

    def __init__(self, name: str):
        self.name_ = name
        self.started_ = False
        self._began = 0.0
        self._total = 0.0
        self._records: list[float] = []

    def start(self) -> None:
        """Begin to measure, after the device's work so far."""
        get_accelerator().synchronize()
        self._began = time.perf_counter()
        self.started_ = True

    def stop(self, reset: bool = False, record: bool = False) -> None:
        """End the measurement, and add it to the total; reset: in place of the total."""
        get_accelerator().synchronize()
        passed = (time.perf_counter() - self._began) * 1000
        self._total = passed + (0.0 if reset else self._total)
        self.started_ = False
        self._records += [passed] if record else []

    def reset(self) -> None:
        """Set the total to 0."""
        self._total = 0.0
        self.started_ = False

    def elapsed(self, reset: bool = True) -> float:
        """Return the total."""
        running = self.started_
        if running:
            self.stop()
        total = self._total
        if reset:
            self.reset()
        if running:
            self.start()
        return total

    def mean(self) -> float:
        """Return the mean of the recorded measurements."""
        return sum(self._records) / len(self._records) if self._records else 0.0


class SynchronizedWallClockTimer:
    """Timers by name: `timers("forward").start()`."""

    Timer = DeviceTimer

    def __init__(self) -> None:
        self.timers: dict[str, DeviceTimer] = {}

    def __call__(self, name: str) -> DeviceTimer:
        return self.timers.setdefault(name, DeviceTimer(name))

    def get_timers(self) -> dict[str, DeviceTimer]:
        """All timers."""
        return self.timers

    def log(
        self,
        names: Sequence[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool = False,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Log the totals, divided by `normalizer`, on rank 0 or on `ranks`."""
        known = [name for name in names if name in self.timers]
        parts = [
            f"{name}: {self.timers[name].elapsed(reset) / normalizer:.2f}"
            for name in known
        ]
        log_dist("time (ms) | " + " | ".join(parts), ranks or [0])

    def get_mean(
        self, names: Sequence[str], normalizer: float = 1.0, reset: bool = True
    ) -> dict[str, float]:
        """Return the means of the recorded measurements of these timers."""
        return {
            name: self.timers[name].mean() / normalizer
            for name in names
            if name in self.timers
        }


class NoopTimer:
    """Timers that measure nothing."""

    class Timer:
        """One of them."""

        def start(self) -> None:
            """Nothing."""

        def stop(self, **options: bool) -> None:
            """Nothing."""

        reset = start

        def elapsed(self, **options: bool) -> float:
            """0."""
            return 0.0

        mean = elapsed

    def __call__(self, name: str) -> "NoopTimer.Timer":
        return self.Timer()

    def get_timers(self) -> dict:
        """No timers."""
        return {}

    def log(self, *args: object, **options: object) -> None:
        """Nothing."""


class ThroughputTimer:
    """Samples per second between `start` and `stop`, without the first `start_step` steps."""

    def __init__(
        self,
        config: object = None,
        batch_size: int = 1,
        start_step: int = 2,
        steps_per_output: int | None = None,
        monitor_memory: bool = False,
        logging_fn: Callable[[str], None] | None = None,
    ):
        self.batch_size = max(1, batch_size)
        self.start_step = start_step
        self.steps_per_output = steps_per_output
        self.logging = logging_fn or log_dist
        self.global_step_count = 0
        self.total_elapsed_time = 0.0
        self._began = 0.0

    def start(self) -> None:
        """Begin a step."""
        get_accelerator().synchronize()
        self._began = time.perf_counter()

    def stop(self, global_step: bool = True, report_speed: bool = True) -> None:
        """End a step."""
        get_accelerator().synchronize()
        self.global_step_count += global_step
        if self.global_step_count > self.start_step:
            self.total_elapsed_time += time.perf_counter() - self._began
        due = (
            self.steps_per_output
            and self.global_step_count % self.steps_per_output == 0
        )
        if due and global_step and report_speed:
            self.logging(
                f"step {self.global_step_count} | {self.avg_samples_per_sec():.2f} samples/s"
            )

    def avg_samples_per_sec(self) -> float:
        """Mean samples per second so far; 0 before there is a measurement."""
        steps = self.global_step_count - self.start_step
        return (
            self.batch_size * steps / self.total_elapsed_time
            if self.total_elapsed_time
            else 0.0
        )


def trim_mean(data: Sequence[float], trim_percent: float) -> float:
    """Mean without the smallest and the largest values, of each a part `trim_percent` of all."""
    values = sorted(data)
    drop = int(len(values) * trim_percent)
    kept = values[drop : len(values) - drop]
    return sum(kept) / len(kept) if kept else 0.0
