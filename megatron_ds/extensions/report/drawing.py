"""Curves of runs, drawn by matplotlib: files, and SVG to be put into a page."""

import io
import math
import re
from collections.abc import Sequence
from typing import Any

from ...host.packages import import_extra
from .recorded_run import Run

# A colour for each run; they differ without colour vision, too. The page has brighter ones for a dark screen.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#7f7f7f")
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


def new_figure(inches: tuple[float, float], rows: int = 1) -> tuple[Any, list[Any]]:
    """Return matplotlib's figure of some rows of axes, one below another, and these axes. Needs no screen.

    Raises ConfigError without matplotlib.
    """
    # Not `pyplot`, which keeps its figures and looks for a screen.
    library = import_extra("drawing", "matplotlib.figure", "report")
    figure = library.Figure(inches, layout="constrained")
    found = figure.subplots(rows, sharex=True, squeeze=False)[:, 0]
    # A frame would distract from the curves.
    for axes in found:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    found[-1].set_xlabel("step")
    return figure, list(found)


def chart(title: str, runs: Sequence[Run]) -> str | None:
    """Return the <svg> element of a chart of `CHARTS`; None when no run has a value for it."""
    field, kinds = CHARTS[title]
    # A curve is interrupted where the value was not finite.
    drawn: list[Curve] = []
    for number, run in enumerate(runs):
        for kind in kinds:
            records = run.last_of_steps(kind)
            numbers = (record.get(field) for record in records)
            values = [*map(_or_nan, numbers)]
            if all(map(math.isnan, values)):
                continue
            steps = [record["step"] for record in records]
            style = {
                **STYLES[kind],
                "color": colour(number),
            }
            curve = (steps, values, style)
            drawn.append(curve)
    return curves(title, drawn) if drawn else None


def curves(title: str, drawn: Sequence[Curve]) -> str:
    """Return the <svg> element of curves against steps; those with a label are in a legend."""
    figure, [axes] = new_figure(INCHES)
    for steps, values, style in drawn:
        axes.plot(steps, values, **style)
    labelled, _ = axes.get_legend_handles_labels()
    if labelled:
        axes.legend(frameon=False, ncols=3, fontsize="small")
    # Words stay words, which a page can search and colour.
    from matplotlib import rc_context

    file = io.StringIO()
    with rc_context({"svg.fonttype": "none"}):
        figure.savefig(file, format="svg", transparent=True)
    return _element(file.getvalue(), title)


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def _element(svg: str, title: str) -> str:
    """Return only the <svg> element, without addresses, with names that no other chart of the page has, and with
    colours that the page sets."""
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
    for number, plain in enumerate(COLOURS):
        text = text.replace(plain, f"var(--run-{number})")
    text = text.replace("#000000", "currentColor")
    return text.replace("<svg ", f'<svg role="img" aria-label="{title}" ', 1)
