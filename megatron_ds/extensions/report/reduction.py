"""The numbers of a run, and the settings that differ between runs."""

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from .recorded_run import Run

Number = float | int | None


def last(run: Run, kind: str, name: str) -> Number:
    """Return the value at the last step; None where it was not finite, or without records."""
    records = run.last_of_steps(kind)
    return records[-1].get(name) if records else None


def known(run: Run, kind: str, name: str) -> list[float]:
    """Return the values of all steps that have one."""
    values = (record.get(name) for record in run.last_of_steps(kind))
    return [value for value in values if value is not None]


def _reduced(reduce: Callable[[Any], Number], kind: str, name: str) -> Callable:
    def number(run: Run) -> Number:
        values = known(run, kind, name)
        return reduce(values) if values else None

    return number


def _last(name: str, kind: str = "train") -> Callable[[Run], Number]:
    return lambda run: last(run, kind, name)


def _count(kind: str) -> Callable[[Run], Number]:
    return lambda run: len(run.last_of_steps(kind))


def processes(run: Run) -> int:
    """Return how many processes trained it, one after another."""
    return len({record.get("start") for record in run.records})


# Name of a number in the page → its label, its format, and how it follows from the records.
NUMBERS: dict[str, tuple[str, str, Callable[[Run], Number]]] = {
    "step": (
        "last step",
        "{:,}",
        _last("step"),
    ),
    "steps": (
        "planned steps",
        "{:,}",
        _last("steps"),
    ),
    "samples": (
        "samples",
        "{:,}",
        _last("samples"),
    ),
    "tokens": (
        "tokens",
        "{:,}",
        _last("tokens"),
    ),
    "loss": (
        "training loss, last",
        "{:.4f}",
        _last("loss"),
    ),
    "validation-loss": (
        "validation loss, last",
        "{:.4f}",
        _last("loss", "validation"),
    ),
    "best-validation-loss": (
        "validation loss, smallest",
        "{:.4f}",
        _reduced(min, "validation", "loss"),
    ),
    "test-loss": (
        "test loss",
        "{:.4f}",
        _last("loss", "test"),
    ),
    "learning-rate": (
        "learning rate, last",
        "{:.3e}",
        _last("learning_rate"),
    ),
    "grad-norm": (
        "gradient norm, last",
        "{:.4f}",
        _last("grad_norm"),
    ),
    "largest-grad-norm": (
        "gradient norm, largest",
        "{:.4f}",
        _reduced(max, "train", "grad_norm"),
    ),
    "tokens-per-second": (
        "tokens per second, median",
        "{:,.0f}",
        _reduced(statistics.median, "train", "tokens_per_second"),
    ),
    "tflops": (
        "TFLOP/s of a rank, median",
        "{:.3g}",
        _reduced(statistics.median, "train", "tflops_per_rank"),
    ),
    "mfu": (
        "MFU, median",
        "{:.1%}",
        _reduced(statistics.median, "train", "mfu"),
    ),
    "memory": (
        "memory of rank 0, largest (GiB)",
        "{:.2f}",
        _reduced(max, "train", "memory_gib"),
    ),
    "skipped-steps": (
        "skipped steps",
        "{:,}",
        _last("skipped_steps"),
    ),
    "nan-steps": (
        "steps with a loss that is NaN",
        "{:,}",
        _last("nan_steps"),
    ),
    "spikes": (
        "spikes, whose update was dropped",
        "{:,}",
        _count("spike"),
    ),
    "reruns": (
        "steps that were computed again",
        "{:,}",
        _count("rerun"),
    ),
    "saves": (
        "checkpoints",
        "{:,}",
        _count("save"),
    ),
    "processes": (
        "processes, one after another",
        "{:,}",
        processes,
    ),
}


class RunNumbers(NamedTuple):
    """A number of each run. name, label, form: as in `NUMBERS`"""

    name: str
    label: str
    form: str
    values: list[Number]


def rows(runs: Sequence[Run]) -> Iterator[RunNumbers]:
    """The numbers that some run has."""
    for name, (label, form, reduce) in NUMBERS.items():
        values = [reduce(run) for run in runs]
        if any(value is not None for value in values):
            yield RunNumbers(name, label, form, values)


def differences(runs: Sequence[Run]) -> dict[str, list[str | None]]:
    """Path of each option that has not one value in all runs → its values; None: the default."""
    paths = sorted({path for run in runs for path in run.settings})
    values = {
        path: [run.settings.get(path, (None,))[0] for run in runs] for path in paths
    }
    return {path: found for path, found in values.items() if len(set(found)) > 1}
