"""The record of benchmarks that were evaluated during a training."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ...training.observe.records import Record


@dataclass(frozen=True)
class TaskRecord(Record):
    """results: task → metric → value."""

    step: int
    samples: int
    results: Mapping[str, Mapping[str, float]]
    eval_seconds: float

    kind = "tasks"

    @property
    def values(self) -> dict[str, float]:
        """Each metric by "TASK METRIC"."""
        found = {}
        for task, metrics in self.results.items():
            for name, value in metrics.items():
                found[f"{task} {name}"] = value
        return found

    def line(self) -> str:
        """All metrics."""
        seconds = self.eval_seconds
        metrics = "".join(f"{name}: {x:.6f} | " for name, x in self.values.items())
        return f" tasks at iteration {self.step} | {metrics}evaluation time (s): {seconds:.2f} | "

    def fields(self) -> dict[str, Any]:
        """Plain values by name, for sinks."""
        own = asdict(self)
        del own["results"]
        return own | self.values

    def curves(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return (metrics, nothing else) by the tag of its curve."""
        return self.values, {}
