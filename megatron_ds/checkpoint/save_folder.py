"""The run that a save folder holds: which one, and how to move it aside. A run writes into no other run's folder.

    s1/iter_0000030/ …                                    of run 4f1c…; another run may not save in s1
    s1/replaced-4f1c…-20261122-171301/iter_0000030/ …     after --overwrite-save: a save folder itself, which --load takes
    s1/tokenizer-…/                                       copied there too: run.json names it relative to the save folder
"""

import json
import logging
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from ..errors import CheckpointError
from . import folder as folders
from .run_file import read_run_file

logger = logging.getLogger(__name__)

METRICS = "metrics.jsonl"
TOKENIZERS = "tokenizer-*"       # the folders that training/tokenizer_files.py makes


@dataclass(frozen=True)
class Occupant:
    """What lies in a save folder.

    step      of the newest checkpoint; None where there are only metrics, or a tracker
    run_id    of the run that wrote it; None where it does not say
    saved_at  when, as text in local time
    """

    step: int | None
    run_id: str | None
    saved_at: str

    def __str__(self) -> str:
        what = "files of a run without a checkpoint" if self.step is None else f"iteration {self.step}"
        return f"{what} (run id {self.run_id or 'unknown'}, written {self.saved_at})"


def occupant_of(folder: Path) -> Occupant | None:
    """None for a folder that a new run may save in: no checkpoint is in it, whole or damaged, and no metrics."""
    steps, metrics = folders.steps_in(folder), folder / METRICS
    if steps:
        path = folders.find(folder, steps[-1])
        return Occupant(steps[-1], _read_run_id(path), _time_of(path))
    if folders.read_tracker(folder) is not None:
        return Occupant(None, _run_of_metrics(metrics), _time_of(folder / folders.TRACKER))
    if metrics.is_file() and metrics.stat().st_size:
        return Occupant(None, _run_of_metrics(metrics), _time_of(metrics))
    return None


def check_vacant(folder: Path, run_id: str, step: int, to_continue: str) -> None:
    """Raises CheckpointError when a run that starts after `step` would write over what `folder` holds.

    Earlier checkpoints of the same run may lie there. to_continue: the advice to a user who wants to continue that run.
    """
    there = occupant_of(folder)
    if there is None or there.run_id == run_id and there.step is not None and there.step <= step:
        return
    whose = "a later iteration of this run" if there.run_id == run_id else "another run"
    if there.step is None:
        to_continue = f"Add --load {folder} to start that run again from scratch, as it has no checkpoint"
    raise CheckpointError(
        f"--save {folder} holds {whose}: {there}. Saving there would mix the two. {to_continue}; add --overwrite-save to move "
        "it into a subfolder and start here; or give another --save folder.")


def _run_of_metrics(metrics: Path) -> str | None:
    """The run id in the last whole record of a metrics file; None where there is none."""
    try:
        with metrics.open("rb") as file:
            file.seek(max(0, metrics.stat().st_size - 65_536))
            lines = file.read().splitlines()
    except OSError:
        return None
    for line in reversed(lines):
        try:
            run = json.loads(line).get("run")
        except (ValueError, AttributeError, RecursionError):
            continue
        return run if isinstance(run, str) and re.fullmatch(r"[0-9a-zA-Z_-]{1,64}", run) else None
    return None


def move_aside(folder: Path, now: datetime | None = None) -> Path | None:
    """Move the checkpoints, the tracker and the metrics into a subfolder; its path, None where there is nothing to move.

    Copies of tokenizers are copied, not moved: the new run may have been given one of them. Other files stay. The caller
    holds the folder's lock.
    """
    there = occupant_of(folder)
    if there is None:
        return None
    aside = folder / f"replaced-{there.run_id or 'unknown'}-{now or datetime.now():%Y%m%d-%H%M%S}"
    aside.mkdir()
    for path in sorted(folder.glob(TOKENIZERS)):
        shutil.copytree(path, aside / path.name)
    for path in sorted(folder.iterdir()):
        if path.name in (folders.TRACKER, METRICS) or path.name.lstrip(".").startswith("iter_"):
            os.rename(path, aside / path.name)
    folders.sync_directory(aside)
    folders.sync_directory(folder)
    logger.info("--overwrite-save: moved %s into %s", there, aside)
    return aside


def run_id_of(run: Mapping) -> str | None:
    """Of a run.json; None where it has none, or one that could not be part of a file name."""
    run_id = run.get("run_id")
    return run_id if isinstance(run_id, str) and re.fullmatch("[0-9A-Za-z]{1,64}", run_id) else None


def _read_run_id(path: Path) -> str | None:
    try:
        return run_id_of(read_run_file(path))
    except CheckpointError:
        return None


def _time_of(path: Path) -> str:
    file = path / folders.RUN_FILE if (path / folders.RUN_FILE).exists() else path
    return f"{datetime.fromtimestamp(file.stat().st_mtime):%Y-%m-%d %H:%M:%S}"
