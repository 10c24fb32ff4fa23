"""The record of benchmarks that were evaluated during a training."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class TaskRecord:
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
        fields = [f" tasks at iteration {self.step}"]
        fields += [f"{name}: {value:.6f}" for name, value in self.values.items()]
        fields.append(f"evaluation time (s): {self.eval_seconds:.2f}")
        return " | ".join(fields) + " |"

    def short(self) -> str:
        """The same with fewer digits."""
        fields = [f"tasks at step {self.step}"]
        fields += [f"{name} {value:.4f}" for name, value in self.values.items()]
        fields.append(f"{self.eval_seconds:.2f} s")
        return " | ".join(fields)

    def fields(self) -> dict[str, Any]:
        """Plain values by name, for sinks."""
        own = asdict(self)
        del own["results"]
        return own | self.values
