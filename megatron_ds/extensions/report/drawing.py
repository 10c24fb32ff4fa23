"""Curves of runs as SVG, to be put into a page."""

import io
import math
import re
from collections.abc import Sequence
from typing import Any

from ...host.packages import import_extra
from .recorded_run import Run

# A colour for each run; they differ without colour vision, too.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")
STYLES: dict[str, dict[str, Any]] = {
    "train": dict(linewidth=1.2),
    "validation": dict(marker="o", linestyle="--", markersize=4),
    "test": dict(marker="s", linestyle="none", markersize=5),
}
# Title → the field that is drawn, and the kinds of records that have it.
CHARTS = {
    "loss": ("loss", ("train", "validation", "test")),
    "learning rate": ("learning_rate", ("train",)),
    "gradient norm": ("grad_norm", ("train",)),
    "tokens per second": ("tokens_per_second", ("train",)),
    "MFU": ("mfu", ("train",)),
}
# Steps, values, matplotlib's options.
Curve = tuple[Sequence[int], Sequence[float], dict[str, Any]]
INCHES = (5.0, 2.9)  # narrow, so that words stay readable on a phone


def colour(number: int) -> str:
    """Return the colour of a run."""
    return COLOURS[number % len(COLOURS)]


def drawing_library() -> Any:
    """matplotlib's pyplot, without a screen. Raises ConfigError without it."""
    matplotlib = import_extra("a report", "matplotlib", "report")
    matplotlib.use("Agg")
    # Letters of an SVG stay text, in the font of the page.
    matplotlib.rcParams["svg.fonttype"] = "none"
    from matplotlib import pyplot

    return pyplot


def chart(title: str, runs: Sequence[Run]) -> str | None:
    """Return the <svg> element of a chart of `CHARTS`; None when no run has a value for it."""
    field, kinds = CHARTS[title]
    # A curve is interrupted where the value was not finite.
    drawn: list[Curve] = []
    for number, run in enumerate(runs):
        for kind in kinds:
            records = run.last_of_steps(kind)
            values = [_or_nan(record.get(field)) for record in records]
            if all(map(math.isnan, values)):
                continue
            steps = [record["step"] for record in records]
            style = STYLES[kind] | {"color": colour(number)}
            curve = (steps, values, style)
            drawn.append(curve)
    return curves(title, drawn) if drawn else None


def curves(title: str, drawn: Sequence[Curve]) -> str:
    """Return the <svg> element of curves against steps; those with a label are in a legend."""
    pyplot = drawing_library()
    figure, axes = pyplot.subplots(figsize=INCHES, layout="constrained")
    for steps, values, style in drawn:
        axes.plot(steps, values, **style)
    # Frame and legend must not distract from the curves.
    axes.set(xlabel="step")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, ncols=3, fontsize="small")
    file = io.StringIO()
    figure.savefig(file, format="svg")
    pyplot.close(figure)
    return _element(file.getvalue(), title)


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def _element(svg: str, title: str) -> str:
    """Return only the <svg> element, without addresses, and with names that no other chart of the page has."""
    text = svg[svg.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text)
    text = re.sub(r' (width|height)="[\d.]+pt"', "", text, count=2)
    prefix = title.replace(" ", "-")
    # Names, and the two ways of naming one.
    for before in (
        ' id="',
        "url(#",
        'href="#',
    ):
        text = text.replace(before, f"{before}{prefix}-")
    opened = f'<svg role="img" aria-label="{title}" '
    return text.replace("<svg ", opened, 1)
