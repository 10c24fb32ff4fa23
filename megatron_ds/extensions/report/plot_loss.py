"""Draw the loss curve of a run from its metrics.jsonl: of the newest run in the file, each step once.

megatron-ds plot-loss --metrics quickstart/metrics.jsonl --output loss.png
"""

import math
from collections.abc import Sequence
from pathlib import Path

from megatron_ds.cli import Arguments, writing
from megatron_ds.errors import ConfigError, DataError
from megatron_ds.training.observe.metrics_file import read_metrics

from .drawing import STYLES, new_figure


def read(path: Path) -> dict[str, list[dict]]:
    """Records by kind ("train", "validation", "test"), each in order of steps."""
    if not path.exists():
        raise DataError(
            f"--metrics {path}: no such file. Start the run with --save or --metrics-jsonl to "
            "write one."
        )
    records: dict[str, list[dict]] = {}
    for record in read_metrics(path):
        records.setdefault(record["kind"], []).append(record)
    return records


def draw(
    records: dict[str, list[dict]],
    output: Path,
    *,
    title: str,
    marks: list[tuple[int, str]],
    vocab_size: int | None,
) -> None:
    """Write the picture, with one curve for each kind of loss."""
    # A curve for each kind of loss.
    figure, [axes] = new_figure((8, 4.5))
    for kind, style in STYLES.items():
        rows = [r for r in records.get(kind, ()) if r["loss"] is not None]
        if rows:
            steps = [r["step"] for r in rows]
            losses = [r["loss"] for r in rows]
            axes.plot(
                steps, losses, label=f"{kind}, {losses[-1]:.2f} at the end", **style
            )
    # The loss of a model that knows nothing.
    if vocab_size:
        axes.axhline(
            math.log(vocab_size),
            color="grey",
            linestyle=":",
            label=f"uniform guess, ln({vocab_size}) = {math.log(vocab_size):.2f}",
        )
    # A mark at step 0 coincides with the axis, so it has a text only.
    for step, text in marks:
        if step:
            axes.axvline(step, color="grey", linewidth=0.8)
        axes.annotate(
            text,
            (step, 0.02),
            xycoords=("data", "axes fraction"),
            xytext=(4, 0),
            textcoords="offset points",
            color="dimgrey",
            fontsize=9,
        )
    # Labels come last, when all curves are known.
    axes.set(ylabel="loss (nats per token)", title=title)
    axes.set_xlim(left=0)
    axes.legend(frameon=False)
    with writing(output):
        figure.savefig(output, dpi=150)


def read_mark(text: str) -> tuple[int, str]:
    """(step, label) of "STEP=TEXT". Raises ConfigError."""
    step, _, words = text.partition("=")
    if not step.isdigit():
        raise ConfigError(f"--mark {text!r}: write STEP=TEXT, such as 300=resumed.")
    return int(step), words


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; its errors are raised."""
    parser = Arguments(__doc__)
    # Only the file and the picture are required.
    parser.add_argument(
        "--metrics", type=Path, required=True, help="metrics.jsonl of a run"
    )
    parser.add_argument(
        "--output", type=Path, required=True, help="picture to write (.png, .svg, .pdf)"
    )
    parser.add_argument("--title", default="", help="title of the picture")
    parser.add_argument(
        "--vocab-size",
        type=int,
        help="also draw the loss of a uniform guess among this many tokens",
    )
    parser.add_argument(
        "--mark",
        action="append",
        default=[],
        metavar="STEP=TEXT",
        help="vertical line at a step, with a label; may be given several times",
    )
    args = parser.parse_args(argv)
    draw(
        read(args.metrics),
        args.output,
        title=args.title,
        marks=[read_mark(text) for text in args.mark],
        vocab_size=args.vocab_size,
    )
    print(f"wrote {args.output}")
    return 0
