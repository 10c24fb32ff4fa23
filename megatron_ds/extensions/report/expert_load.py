"""How evenly the experts of each layer were used, from the records of training steps."""

import statistics
from collections.abc import Callable, Sequence

from .plot_expert_load import PANELS, Curves, curves_of
from .recorded_run import Run

Points = list[tuple[int, float]]


def _last(values: Sequence[float]) -> float:
    return values[-1]


# Heading of a column → its metric, its format, and how its number follows from the values of a layer.
COLUMNS: dict[str, tuple[str, str, Callable[[Sequence[float]], float]]] = {
    "load, last": (
        "max_load",
        "{:.3f}",
        _last,
    ),
    "load, mean": (
        "max_load",
        "{:.3f}",
        statistics.fmean,
    ),
    "load, largest": (
        "max_load",
        "{:.3f}",
        max,
    ),
    "entropy, last": (
        "router_entropy",
        "{:.3f}",
        _last,
    ),
    "dropped, last": (
        "dropped",
        "{:.2%}",
        _last,
    ),
    "dropped, mean": (
        "dropped",
        "{:.2%}",
        statistics.fmean,
    ),
}
LABELS = {panel.metric: panel.label for panel in PANELS}


def curves(run: Run) -> Curves:
    """Metric → layer → its points, of the newest record of each step; empty for a model without experts."""
    records = run.last_of_steps("train")
    has_experts = any(name.endswith("_max_load") for r in records for name in r)
    return curves_of(records) if has_experts else {}


def values_of(points: Points) -> list[float]:
    """Return the values, without steps."""
    return [value for _, value in points]
