"""Train a small GPT under three layouts and draw the first picture of the README: the schedule of one of
them, and the losses of all.

    python tools/draw_layouts.py --work runs/layouts     train, then write docs/pictures/layouts.json and .svg
    python tools/draw_layouts.py --draw-only             draw the losses of layouts.json again

The model has 1.0 million parameters and learns the documentation of the Python that runs this command, in
fp32. At its learning rate training is stable: at 4e-3 gradients spike, and after a spike differences of
rounding grow tenfold per step. Training takes a few minutes on two cores. The first layout is one process,
the second four, the third two, which continue from a checkpoint of the second.
"""

import argparse
import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_ds.cli import Arguments, main_guard  # noqa: E402
from megatron_ds.extensions.report.picture import FAINT, INK, Panel, svg  # noqa: E402
from megatron_ds.pipeline.passes import add_transfers  # noqa: E402
from megatron_ds.pipeline.schedules import SCHEDULES  # noqa: E402
from megatron_ds.pipeline.simulate import simulate  # noqa: E402
from megatron_ds.training.observe.metrics_file import read_metrics  # noqa: E402

# The file that names the step to load.
TRACKER = "latest_checkpointed_iteration.txt"
STEPS = 160
HALF = STEPS // 2
MODEL = f"""--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --hidden-dropout 0 --attention-dropout 0 --micro-batch-size 1 --global-batch-size 8
    --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 16 --train-iters {STEPS}
    --eval-iters 0 --log-interval 1 --split 100,0,0
    --tokenizer-type HuggingFaceTokenizer""".split()


@dataclass(frozen=True)
class Run:
    """One layout: its name in the picture, number of processes, flags, and how its curve is drawn."""

    name: str
    processes: int
    flags: tuple[str, ...]
    colour: str
    width: float


RUNS = (
    Run("1 process", 1, (), "#b9d3ee", 9),
    Run(
        "4 processes: TP 2 × PP 2, zb-v",
        4,
        (
            "--tensor-model-parallel-size",
            "2",
            "--pipeline-model-parallel-size",
            "2",
            "--sequence-parallel",
            "--pipeline-schedule",
            "zb-v",
        ),
        "#d9822b",
        4.5,
    ),
    Run(
        f"2 processes: ZeRO 3, resumed from these four at step {HALF}",
        2,
        ("--zero-stage", "3"),
        "#22272e",
        1.4,
    ),
)
Losses = dict[str, dict[int, float]]  # name of a run → step → loss

SCHEDULE = "zb-v"
RANKS = 4
MICRO_BATCHES = 8

TITLE = "One loss under three layouts"
MODEL_AND_DATA = "GPT of 1.0 M parameters, fp32, on the documentation of Python"
GRID = "#e4e7ea"
# Pixels.
WIDTH = 560
HEIGHT = 340
LEFT = 52
RIGHT = 14
TOP = 50
BOTTOM = 96
STRIP = 52


def main(args: argparse.Namespace) -> int:
    """Train unless only the drawing is asked for, then write the picture."""
    numbers = args.output.with_suffix(".json")
    if not args.draw_only:
        numbers.write_text(
            json.dumps(train(args.work), indent=0) + "\n", encoding="utf-8"
        )
    losses = read(numbers)
    args.output.write_text(picture(losses), encoding="utf-8")
    print(
        f"wrote {args.output}; largest relative difference of a loss: {largest_difference(losses):.1e}"
    )
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = Arguments(__doc__)
    parser.add_argument(
        "--work",
        type=Path,
        default=Path("runs/layouts"),
        help="folder for the corpus, the tokenizer and the runs (default: %(default)s)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=ROOT / "docs" / "pictures" / "layouts.svg",
        help="picture to write; the losses are in a .json beside it (default: %(default)s)",
    )
    parser.add_argument("--draw-only", action="store_true", help="train nothing")
    return parser.parse_args()


# ----------------------------------------------------------------------------------------------- training
def train(work: Path) -> Losses:
    """Make a corpus in `work`, train all runs one after the other and return their losses."""
    work.mkdir(parents=True, exist_ok=True)
    tokenizer = work / "tokenizer"
    corpus = work / "corpus"

    # From text to tokens, as in the quickstart.
    _call("-m", "megatron_ds", "corpus", "--output", f"{corpus}.jsonl")
    _call(
        "-m",
        "megatron_ds",
        "tokenizer",
        "--input",
        f"{corpus}.jsonl",
        "--vocab-size",
        "2048",
        "--output",
        tokenizer,
    )
    _call(
        "-m",
        "megatron_ds",
        "preprocess",
        "--input",
        f"{corpus}.jsonl",
        "--output-prefix",
        corpus,
        "--append-eod",
        "--tokenizer-type",
        "HuggingFaceTokenizer",
        "--tokenizer-model",
        tokenizer,
    )

    # Each run writes its own metrics. The last one loads a checkpoint of the one before.
    losses: Losses = {}
    for number, run in enumerate(RUNS):
        metrics = work / f"{number}.jsonl"
        metrics.unlink(missing_ok=True)
        checkpoints = []
        if number == 1:
            checkpoints = [
                "--save",
                work / "saved",
                "--save-interval",
                str(HALF),
                "--overwrite-save",
            ]
        if number == 2:
            (work / "saved" / TRACKER).write_text(str(HALF), encoding="utf-8")
            checkpoints = ["--load", work / "saved"]
        _call(
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(run.processes),
            ROOT / "pretrain_gpt.py",
            *MODEL,
            "--data-path",
            f"{corpus}_text_document",
            "--tokenizer-model",
            tokenizer,
            "--metrics-jsonl",
            metrics,
            *checkpoints,
            *run.flags,
        )
        losses[run.name] = {
            record["step"]: record["loss"]
            for record in read_metrics(metrics)
            if record["kind"] == "train"
        }
    return losses


def _call(*words: str | Path) -> None:
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": str(ROOT),
    }
    subprocess.run([sys.executable, *map(str, words)], env=environment, check=True)


def read(numbers: Path) -> Losses:
    """The losses that a training has written."""
    stored = json.loads(numbers.read_text(encoding="utf-8"))
    return {
        name: {int(step): loss for step, loss in curve.items()}
        for name, curve in stored.items()
    }


# ------------------------------------------------------------------------------------------------ drawing
def differences(losses: Losses, run: Run) -> dict[int, float]:
    """Step → relative difference of a run's loss from that of one process."""
    reference = losses[RUNS[0].name]
    return {step: loss / reference[step] - 1 for step, loss in losses[run.name].items()}


def largest_difference(losses: Losses) -> float:
    return max(
        abs(difference)
        for run in RUNS
        for difference in differences(losses, run).values()
    )


def picture(losses: Losses) -> str:
    """Both halves of the picture as the text of an SVG file: the schedule left, the losses right."""
    timeline = simulate(
        add_transfers(SCHEDULES[SCHEDULE](RANKS, MICRO_BATCHES, 2), 2 * RANKS)
    )
    title = (
        f"One step of a pipeline: {SCHEDULE}, {RANKS} ranks, {MICRO_BATCHES} micro-batches, "
        f"bubble {timeline.bubble:.0%}"
    )
    # The legend's note is too long for half a picture: a line of its own has it.
    lines = svg([Panel(title, timeline)], 640).splitlines()
    schedule = "\n".join(line for line in lines if "numbers are" not in line)
    explanation = "Numbers are micro-batches; pale: the second stage of a rank."
    note = _text(62, 218, explanation, colour=FAINT, size=11)
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" width="1220" height="340" viewBox="0 0 1220 340" '
        'font-family="DejaVu Sans, Helvetica, Arial, sans-serif" font-size="12">',
        '<rect width="1220" height="340" fill="#ffffff"/>',
        f'<g transform="translate(0 50)">{schedule}{note}</g>',
        f'<g transform="translate(655 0)">{_curves(losses)}</g>',
        "</svg>",
        "",
    ]
    return "\n".join(parts)


def _curves(losses: Losses) -> str:
    """The losses of all runs in one plot, and below it their differences from one process."""
    reference = losses[RUNS[0].name]
    least = min(reference.values())
    most = max(reference.values())
    bottom = HEIGHT - BOTTOM
    across = lambda step: LEFT + (step - 1) / (STEPS - 1) * (WIDTH - LEFT - RIGHT)
    down = lambda loss: TOP + (most - loss) / (most - least) * (bottom - TOP)
    lines = [
        _text(LEFT, 18, TITLE, bold=True, size=13),
        _text(LEFT, 36, MODEL_AND_DATA, colour=FAINT, size=11),
    ]

    # Axes: a grid line per nat, a number every quarter of the run.
    for nats in range(int(least) + 1, int(most) + 1):
        lines += [
            _line(LEFT, down(nats), WIDTH - RIGHT, down(nats)),
            _text(LEFT - 8, down(nats) + 4, str(nats), "end"),
        ]
    for step in (1, *range(STEPS // 4, STEPS + 1, STEPS // 4)):
        lines.append(_text(across(step), HEIGHT - 6, str(step), "middle", size=11))
    lines.append(
        _text(across(STEPS / 8), HEIGHT - 6, "step", "middle", colour=FAINT, size=11)
    )

    # Each curve is thinner than the one below it, so that all can be seen where they coincide.
    for place, run in enumerate(RUNS):
        y = TOP + 14 + 20 * place
        lines += [
            _path(
                [(across(step), down(loss)) for step, loss in losses[run.name].items()],
                run,
            ),
            _line(LEFT + 110, y - 4, LEFT + 140, y - 4, run.colour, run.width),
            _text(LEFT + 150, y, run.name),
        ]

    # The strip below: relative differences, to a scale of their own.
    scale = largest_difference(losses)
    middle = HEIGHT - BOTTOM + 20 + STRIP / 2
    lines.append(_line(LEFT, middle, WIDTH - RIGHT, middle))
    for run in RUNS[1:]:
        points = [
            (across(step), middle - difference / scale * STRIP / 2)
            for step, difference in differences(losses, run).items()
        ]
        lines.append(_path(points, replace(run, width=1.2)))
    lines += [
        _text(LEFT - 8, middle + 4, "0", "end"),
        _text(
            LEFT + 4,
            middle - STRIP / 2 - 6,
            f"relative difference from 1 process, at most {scale:.0e}",
            size=11,
        ),
    ]
    return "\n".join(lines)


def _path(points: list[tuple[float, float]], run: Run) -> str:
    listed = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return (
        f'<polyline points="{listed}" fill="none" stroke="{run.colour}" stroke-width="{run.width:g}" '
        'stroke-linejoin="round" stroke-linecap="round"/>'
    )


def _line(
    x1: float, y1: float, x2: float, y2: float, colour: str = GRID, width: float = 1
) -> str:
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" '
        f'stroke-width="{width:g}"/>'
    )


def _text(
    x: float,
    y: float,
    text: str,
    anchor: str = "start",
    colour: str = INK,
    bold: bool = False,
    size: int = 12,
) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}" '
        f'font-size="{size}"{weight}>{escape(text)}</text>'
    )


if __name__ == "__main__":
    sys.exit(main_guard(lambda: main(parse_arguments())))
