"""The run that a save folder holds, and how to move it aside. A run does not save into another run's folder.

s1/iter_0000030/ …                                   of run 4f1c…; another run may not save in s1
s1/replaced-4f1c…-20261122-171301/iter_0000030/ …    after --overwrite-save: itself a folder for --load
s1/tokenizer-…/                                      copied there too: run.json has its relative path
"""

import json
import logging
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import count
from pathlib import Path

from ..errors import CheckpointError, MismatchError
from . import folder as folders
from .run_file import read_run_file

logger = logging.getLogger(__name__)

METRICS = "metrics.jsonl"
TOKENIZERS = "tokenizer-*"  # folders that checkpoint/tokenizer_files.py creates


@dataclass(frozen=True)
class SavedRun:
    """The run in a save folder.

    step      of the newest checkpoint; None when there are only metrics, or a tracker
    run_id    None when it is not recorded
    saved_at  time of the newest file as text, in local time
    """

    step: int | None
    run_id: str | None
    saved_at: str

    def __str__(self) -> str:
        what = (
            "files of a run without a checkpoint"
            if self.step is None
            else f"iteration {self.step}"
        )
        return f"{what} (run id {self.run_id or 'unknown'}, written {self.saved_at})"


def saved_run_in(folder: Path) -> SavedRun | None:
    """Return the run in `folder`; None when a new run may save there: it has no checkpoint and no metrics."""
    steps = folders.steps_in(folder)
    metrics = folder / METRICS
    path = folders.find(folder, steps[-1]) if steps else None
    if path is not None:
        run_id = None
        with suppress(CheckpointError):
            run_id = run_id_of(read_run_file(path))
        return SavedRun(steps[-1], run_id, _time_of(path))
    if folders.read_tracker(folder) is not None:
        return SavedRun(
            None, _run_of_metrics(metrics), _time_of(folder / folders.TRACKER)
        )
    if metrics.is_file() and metrics.stat().st_size:
        return SavedRun(None, _run_of_metrics(metrics), _time_of(metrics))
    return None


def check_vacant(
    folder: Path, run_id: str, step: int, to_continue: str, to_begin: str
) -> None:
    """Raises MismatchError if a run that starts after `step` would overwrite the run in `folder`.

    Earlier checkpoints of the same run are allowed, and so are its files before the first one: such a run begins
    again. to_continue, to_begin: advice for a run there with a checkpoint, and for one without
    """
    there = saved_run_in(folder)
    if there is None:
        return
    is_own = there.run_id == run_id
    if is_own and (there.step is None or there.step <= step):
        return
    whose = "a later iteration of this run" if is_own else "another run"
    advice = to_begin if there.step is None else to_continue
    raise MismatchError(
        f"--save {folder} holds {whose}: {there}. Saving there would mix the two. {advice}; add "
        "--overwrite-save to move it into a subfolder and start here; or give another --save folder."
    )


def _run_of_metrics(metrics: Path) -> str | None:
    """Return the run id in the last complete record of a metrics file; None when there is none."""
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
        return (
            run
            if isinstance(run, str) and re.fullmatch(r"[0-9a-zA-Z_-]{1,64}", run)
            else None
        )
    return None


def move_aside(folder: Path, now: datetime | None = None) -> Path | None:
    """Move checkpoints, tracker and metrics into a subfolder. Return its path, None when there is nothing to move.

    Tokenizer folders are copied, not moved, because the new run may use one of them. Other files stay. The
    caller holds the folder's lock.
    """
    there = saved_run_in(folder)
    if there is None:
        return None
    name = f"replaced-{there.run_id or 'unknown'}-{now or datetime.now():%Y%m%d-%H%M%S}"
    aside = _new_directory(folder, name)
    for path in sorted(folder.glob(TOKENIZERS)):
        shutil.copytree(path, aside / path.name)
    for path in sorted(folder.iterdir()):
        if path.name in (folders.TRACKER, METRICS) or path.name.lstrip(".").startswith(
            "iter_"
        ):
            os.rename(path, aside / path.name)
    folders.sync_directory(aside)
    folders.sync_directory(folder)
    logger.info("--overwrite-save: moved %s into %s", there, aside)
    return aside


def _new_directory(folder: Path, name: str) -> Path:
    """Create folder/name, or name-2, name-3, … if another start in the same second has created it."""
    for number in count(1):
        path = folder / (name if number == 1 else f"{name}-{number}")
        with suppress(FileExistsError):
            path.mkdir()
            return path
    raise AssertionError("the numbers do not end")


def run_id_of(run: Mapping) -> str | None:
    """Return the run id in a run.json; None when it has none, or one that cannot be part of a file name."""
    run_id = run.get("run_id")
    return (
        run_id
        if isinstance(run_id, str) and re.fullmatch("[0-9A-Za-z]{1,64}", run_id)
        else None
    )


def _time_of(path: Path) -> str:
    file = path / folders.RUN_FILE if (path / folders.RUN_FILE).exists() else path
    return f"{datetime.fromtimestamp(file.stat().st_mtime):%Y-%m-%d %H:%M:%S}"
