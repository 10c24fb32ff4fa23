"""A run in a few sentences for readers without knowledge of it: what was trained and how, how long, how well."""

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from .goodput import Goodput
from .recorded_run import Run
from .reduction import known, last, processes

# Seconds → the units of a duration, the larger two of which are written.
UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
# Kind of an evaluation → its noun in a sentence.
SPLITS = {"validation": "validation loss", "test": "test loss"}


def paragraph(run: Run, spent: Goodput) -> str:
    """Return the sentences. What a file of an earlier version does not have is left out."""
    return " ".join(
        (*_what(run.about), *_how(run), *_how_long(run, spent), *_how_well(run))
    )


def duration(seconds: float) -> str:
    """Return a time as text, in its two largest units: 1 h 23 min, 41 s."""
    left = round(seconds)
    words = []
    for size, unit in UNITS:
        count, left = divmod(left, size)
        if count:
            words.append(f"{count} {unit}")
    return " ".join(words[:2]) or "less than 1 s"


def _what(about: Mapping[str, Any]) -> Iterator[str]:
    if not about:
        return
    text = f"A {about['model']} model with {about['parameters']:,} parameters"
    if about["trained"] != about["parameters"]:
        text += f", of which {about['trained']:,} are trained"
    text += f": {counted(about['layers'], 'layer')} of width {about['width']:,}"
    text += f" with {counted(about['heads'], 'head')}"
    if about["experts"]:
        text += f" and up to {about['experts']:,} experts"
    yield (
        f"{text}, a vocabulary of {about['vocabulary']:,} tokens, and sequences of "
        f"{about['sequence']:,} tokens."
    )


def _how(run: Run) -> Iterator[str]:
    about = run.about
    if not about:
        return
    data = f" on {_listed(about['data'])}" if about["data"] else ""
    yield (
        f"It was trained{data} by {about['optimizer']} in {about['dtype']}, with "
        f"{counted(about['batch'], 'sample')} a step."
    )
    # Axes of the mesh that divide nothing are left out.
    machine = run.environment
    ranks = counted(int(machine["ranks"]), "rank")
    axes = " × ".join(f"{axis} {size}" for axis, size in about["layout"].items())
    layout = f" as {axes}" if axes else ""
    yield (
        f"It ran on {ranks}{layout} with ZeRO stage {about['zero']}, on {machine['device']} of host "
        f"{machine['host']}."
    )


def _how_long(run: Run, spent: Goodput) -> Iterator[str]:
    step = last(run, "train", "step")
    if step is None:
        yield "It has no log line of a step yet."
        return
    steps = last(run, "train", "steps")
    tokens = last(run, "train", "tokens")
    text = f"It made {step:,} of {steps:,} steps, {tokens:,} tokens, in {duration(spent.wall)}"
    # Wall times of files that have them.
    times = [record["time"] for record in run.records if "time" in record]
    if times:
        text += f", until {datetime.fromtimestamp(times[-1], UTC):%Y-%m-%d %H:%M} UTC"
    if processes(run) > 1:
        text += f", in {processes(run)} processes one after another"
    yield f"{text}."
    if spent.wall > 0:
        kept = spent.parts["training"] / spent.wall
        yield f"The steps that count took {kept:.0%} of this time."


def _how_well(run: Run) -> Iterator[str]:
    losses = known(run, "train", "loss")
    if not losses:
        return
    text = f"The training loss went from {losses[0]:.4f} to {losses[-1]:.4f}"
    for split, noun in SPLITS.items():
        values = known(run, split, "loss")
        if values:
            text += f", the {noun} is {values[-1]:.4f}"
        if values and min(values) < values[-1]:
            text += f" (at best {min(values):.4f})"
    yield f"{text}."
    # Most runs have no such steps.
    trouble = {
        "skipped": last(run, "train", "skipped_steps"),
        "with a loss that is NaN": last(run, "train", "nan_steps"),
    }
    for what, count in trouble.items():
        if count:
            yield f"Steps {what}: {count:,}."


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: 1 layer, 24 layers."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _listed(names: list[str], most: int = 4) -> str:
    """Return the names; of many the first, and how many others there are."""
    if len(names) > most:
        return f"{', '.join(names[:most])} and {len(names) - most:,} others"
    if len(names) == 1:
        return names[0]
    return f"{', '.join(names[:-1])} and {names[-1]}"
