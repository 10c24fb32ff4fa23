"""Show a run in the terminal while it trains, from its metrics.jsonl. Ctrl-C ends the view, not the run.

megatron-ds watch runs/notes

RUN is a --save folder that holds metrics.jsonl, or the file that --metrics-jsonl named.
"""

import math
import statistics
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from ...cli import Arguments
from ...console import printable
from ...errors import ConfigError
from ...host.packages import import_extra
from .recorded_run import Run, metrics_file, read_run

BARS = "▁▂▃▄▅▆▇█"
BESIDE = 25  # columns of the frame and of the longest label, beside a curve
LEAST = 16  # columns of a curve


# Label → the field of a log line, and its format.
FIELDS = {
    "loss": ("loss", ".4f"),
    "learning rate": ("learning_rate", ".3e"),
    "gradient norm": ("grad_norm", ".4f"),
    "tokens per second": ("tokens_per_second", ",.0f"),
    "MFU": ("mfu", ".1%"),
    "skipped steps": ("skipped_steps", ","),
}


def facts(run: Run, now: float) -> dict[str, str]:
    """Label → text, in the order of the view. now: seconds since the epoch."""
    found: dict[str, str] = {}
    # A run that has just begun has no log line.
    for record in run.last_of_steps("train")[-1:]:
        step = record["step"]
        steps = record["steps"]
        left = _duration(record["eta_seconds"])
        found["step"] = f"{step:,} of {steps:,}, {left} left"
        for label, (field, form) in FIELDS.items():
            found[label] = _number(record[field], form)
    # Evaluations and checkpoints are less frequent than log lines.
    for record in run.last_of_steps("validation")[-1:]:
        step = record["step"]
        loss = _number(record["loss"], ".4f")
        found["validation loss"] = f"{loss} at step {step:,}"
    for record in run.last_of_steps("save")[-1:]:
        step = record["step"]
        found["checkpoint"] = f"step {step:,}"
    # Most runs have no spikes.
    for kind in ("spike", "rerun"):
        records = run.last_of_steps(kind)
        if records:
            step = records[-1]["step"]
            found[f"{kind}s"] = f"{len(records)}, the last at step {step:,}"
    # The age shows whether the run still writes.
    newest = run.records[-1]
    age = now - newest.get("time", now)
    found["newest record"] = f"{_duration(age)} ago"
    return found


def curve(values: Sequence[float | None], width: int) -> str:
    """Return the values as bars of a line of text, each the mean of as many neighbours as fit `width` columns."""
    known = [value for value in values if value is not None]
    if not known:
        return ""
    # There are more values than columns.
    size = math.ceil(len(known) / width)
    means = []
    for first in range(0, len(known), size):
        part = known[first : first + size]
        means.append(statistics.fmean(part))
    # Heights are relative to the smallest and the largest mean.
    low = min(means)
    span = max(means) - low or 1.0
    bars = []
    for mean in means:
        height = (mean - low) / span
        bar = round(height * (len(BARS) - 1))
        bars.append(BARS[bar])
    return "".join(bars)


def _number(value: float | None, form: str) -> str:
    if value is None:
        return "–"
    return format(value, form)


def _duration(seconds: float) -> timedelta:
    return timedelta(seconds=round(seconds))


def _size(path: Path) -> int:
    """Bytes; -1 for a file that was removed, which `read_run` reports."""
    return path.stat().st_size if path.exists() else -1


def view(run: Run, now: float, width: int) -> Any:
    """Return what a terminal of so many columns shows: a panel of rich."""
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    losses = [record["loss"] for record in run.last_of_steps("train")]
    rows = facts(run, now)
    rows["loss curve"] = curve(losses, max(LEAST, width - BESIDE))
    # `Text`, since rich reads commands in a plain str.
    for label, text in rows.items():
        name = Text(label, style="dim")
        table.add_row(name, Text(text))
    title = Text(printable(run.name))
    return Panel.fit(table, title=title)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; its errors are raised."""
    parser = Arguments(__doc__)
    parser.add_argument(
        "run",
        type=Path,
        metavar="RUN",
        help="folder or file of a run",
    )
    parser.add_argument(
        "--once",
        action="store_true",
        help="print the view, and end",
    )
    parser.add_argument(
        "--interval",
        type=float,
        default=2.0,
        help="seconds between looks at the file",
    )
    args = parser.parse_args(argv)
    if args.interval <= 0:
        raise ConfigError(f"--interval {args.interval} is not positive.")
    import_extra("watching", "rich", "report")
    from rich.console import Console
    from rich.live import Live

    run = read_run(args.run)
    console = Console()
    if args.once:
        console.print(view(run, time.time(), console.width))
        return 0
    # The file is read again when it has grown.
    path = metrics_file(args.run)
    size = _size(path)
    with Live(console=console, auto_refresh=False) as live:
        while True:
            now = time.time()
            live.update(view(run, now, console.width), refresh=True)
            time.sleep(args.interval)
            grown = _size(path)
            if grown != size:
                size = grown
                run = read_run(args.run)
