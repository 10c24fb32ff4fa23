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

# Parts of sentences, filled from the record `about` of a run.
MODEL = "A {model} model with {parameters:,} parameters"
TRAINED = ", of which {trained:,} are trained"
LAYERS = ": {of_layers} of width {width:,} with {of_heads}"
EXPERTS = " and up to {experts:,} experts"
TOKENS = (
    ", a vocabulary of {vocabulary:,} tokens, and sequences of {sequence:,} tokens."
)
TRAINING = "It was trained{data} by {optimizer} in {dtype}, with {samples} a step."
MACHINE = "It ran on {ranks}{axes} with ZeRO stage {zero}, on {device} of host {host}."
STEPS = "It made {step:,} of {steps:,} steps, {tokens:,} tokens, in {time}"
LOSSES = "The training loss went from {:.4f} to {:.4f}"


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
    parts = [MODEL]
    if about["trained"] != about["parameters"]:
        parts.append(TRAINED)
    parts.append(LAYERS)
    if about["experts"]:
        parts.append(EXPERTS)
    parts.append(TOKENS)
    yield "".join(parts).format(
        **about,
        of_layers=counted(about["layers"], "layer"),
        of_heads=counted(about["heads"], "head"),
    )


def _how(run: Run) -> Iterator[str]:
    about = run.about
    if not about:
        return
    data = about["data"]
    yield TRAINING.format(
        **{**about, "data": f" on {_listed(data)}" if data else ""},
        samples=counted(about["batch"], "sample"),
    )
    # Axes of the mesh that divide nothing are left out.
    machine = run.environment
    sizes = about["layout"].items()
    axes = " × ".join(f"{axis} {size}" for axis, size in sizes)
    yield MACHINE.format(
        ranks=counted(int(machine["ranks"]), "rank"),
        axes=f" as {axes}" if axes else "",
        zero=about["zero"],
        device=machine["device"],
        host=machine["host"],
    )


def _how_long(run: Run, spent: Goodput) -> Iterator[str]:
    step = last(run, "train", "step")
    if step is None:
        yield "It has no log line of a step yet."
        return
    text = STEPS.format(
        step=step,
        steps=last(run, "train", "steps"),
        tokens=last(run, "train", "tokens"),
        time=duration(spent.wall),
    )
    # Wall times of files that have them.
    times = [record["time"] for record in run.records if "time" in record]
    if times:
        end = datetime.fromtimestamp(times[-1], UTC)
        text += f", until {end:%Y-%m-%d %H:%M} UTC"
    count = processes(run)
    if count > 1:
        text += f", in {count} processes one after another"
    yield f"{text}."
    if spent.wall > 0:
        kept = spent.parts["training"] / spent.wall
        yield f"The steps that count took {kept:.0%} of this time."


def _how_well(run: Run) -> Iterator[str]:
    losses = known(run, "train", "loss")
    if not losses:
        return
    text = LOSSES.format(losses[0], losses[-1])
    for split, noun in SPLITS.items():
        values = known(run, split, "loss")
        if not values:
            continue
        text += f", the {noun} is {values[-1]:.4f}"
        best = min(values)
        if best < values[-1]:
            text += f" (at best {best:.4f})"
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
    if len(names) == 1:
        return names[0]
    shown = names[:-1]
    final = names[-1]
    if len(names) > most:
        shown = names[:most]
        final = f"{len(names) - most:,} others"
    return " and ".join([", ".join(shown), final])
