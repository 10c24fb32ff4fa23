"""A picture of all layouts of a search: memory against time."""

from collections.abc import Sequence
from pathlib import Path

from ...errors import ConfigError
from ...host.packages import import_extra
from .search import PlannedLayout, Tried


def draw_layouts(
    path: Path, tried: Sequence[Tried], found: Sequence[PlannedLayout], memory: float
) -> None:
    """Draw each layout as a dot: seconds of a step and bytes of its largest rank; those found have a number.

    Raises ConfigError without matplotlib, and for a file that cannot be written.
    """
    matplotlib = import_extra("--picture", "matplotlib", "report")
    # "Agg" draws without a screen.
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    axes.scatter(
        [one.estimate.seconds for one in tried],
        [one.estimate.peak / 1e9 for one in tried],
        s=8,
        color="0.6",
        label="estimated",
    )
    axes.scatter(
        [one.seconds for one in found],
        [one.peak / 1e9 for one in found],
        s=30,
        color="tab:blue",
        label="planned",
    )
    for number, one in enumerate(found, 1):
        axes.annotate(str(number), (one.seconds, one.peak / 1e9))
    # Both axes are logarithmic: layouts differ by factors.
    axes.axhline(memory / 1e9, color="tab:red", linewidth=1, label="memory of a device")
    axes.set(xscale="log", yscale="log", xlabel="seconds of a step")
    axes.set_ylabel("GB of the rank that needs the most")
    axes.legend()
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--picture {path}: {error}") from error
    finally:
        plt.close(figure)
