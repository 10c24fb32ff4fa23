"""Draw how evenly the experts are used over a run, from its metrics.jsonl, by layer.

    megatron-ds plot-experts --metrics moe/metrics.jsonl --output expert_load.png

Upper panel: slots of the most loaded expert, relative to the mean of its layer; 1 is an even load. Lower
panel: entropy of the router; at most ln E for E experts. Where experts have a capacity, a third panel has the
share of dropped slots.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_ds.cli import Arguments, writing
from megatron_ds.errors import ConfigError, DataError
from megatron_ds.training.observe.metrics_file import read_metrics

from .drawing import new_figure

LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)_(max_load|router_entropy|dropped)")


@dataclass(frozen=True)
class MetricPanel:
    """A metric of each layer. level: the value of a perfectly even load; None without one."""

    metric: str
    label: str
    level: float | None


PANELS = (
    MetricPanel("max_load", "largest load / mean", 1.0),
    MetricPanel("router_entropy", "router entropy (nats)", None),
    MetricPanel("dropped", "share of dropped slots", 0.0),
)
Curves = dict[str, dict[int, list[tuple[int, float]]]]


def curves_of(records: list[dict]) -> Curves:
    """Metric → layer → [(step, value)] of the training steps.

    Raises DataError where no layer has experts.
    """
    curves: Curves = {}
    for record in records:
        if record["kind"] != "train":
            continue
        for name, value in record.items():
            if (found := LAYER.fullmatch(name)) and value is not None:
                layers = curves.setdefault(found[2], {})
                layers.setdefault(int(found[1]), []).append((record["step"], value))
    if not curves:
        raise DataError(
            "no record of a training step has the load of experts, such as "
            "decoder.layers.1_max_load. Give the metrics.jsonl of a run with --num-experts."
        )
    return curves


def smoothed(points: list[tuple[int, float]], window: int) -> list[tuple[int, float]]:
    """Means over the last `window` points, at most."""
    values = [value for _, value in points]
    mean = lambda i: sum(values[max(0, i + 1 - window) : i + 1]) / min(window, i + 1)
    return [(step, mean(i)) for i, (step, _) in enumerate(points)]


def draw(curves: Curves, output: Path, *, title: str, window: int) -> None:
    """Write the picture, with one line for each layer."""
    # One panel for each metric that the run recorded.
    shown = [panel for panel in PANELS if panel.metric in curves]
    figure, rows = new_figure((8, 1 + 2.4 * len(shown)), len(shown))
    for axes, panel in zip(rows, shown):
        for layer, points in sorted(curves[panel.metric].items()):
            axes.plot(
                *zip(*smoothed(points, window)), label=f"layer {layer}", linewidth=1.3
            )
        if panel.level is not None:
            axes.axhline(panel.level, color="grey", linestyle=":", linewidth=1)
        axes.set_ylabel(panel.label)
    # The panels share legend, title and steps.
    rows[0].legend(frameon=False, ncols=4)
    rows[0].set_title(title)
    rows[-1].set_xlim(left=0)
    with writing(output):
        figure.savefig(output, dpi=150)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; its errors are raised."""
    parser = Arguments(__doc__)
    parser.add_argument(
        "--metrics", type=Path, required=True, help="metrics.jsonl of a run"
    )
    parser.add_argument(
        "--output", type=Path, required=True, help="picture to write (.png, .svg, .pdf)"
    )
    parser.add_argument(
        "--title", default="Load of the experts", help="title of the picture"
    )
    parser.add_argument(
        "--window",
        type=int,
        default=5,
        help="draw the mean over this many points (default 5; 1: every point)",
    )
    # Values that argparse cannot check.
    args = parser.parse_args(argv)
    if args.window < 1:
        raise ConfigError(
            f"--window {args.window} is not a number of points. Use 1 or more."
        )
    if not args.metrics.exists():
        raise DataError(
            f"--metrics {args.metrics}: no such file. Start the run with --save or "
            "--metrics-jsonl to write one."
        )
    # Errors of the file are raised before matplotlib draws.
    draw(
        curves_of(read_metrics(args.metrics)),
        args.output,
        title=args.title,
        window=args.window,
    )
    print(f"wrote {args.output}")
    return 0
