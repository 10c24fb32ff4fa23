"""Where a run starts: the checkpoint it loads, its run id, and whether its save folder is free.

    --load D, D has a checkpoint       that run continues under its run id (with --finetune: a new run)
    --load D --save D, D has none      a new run: the same command starts and resumes
    --load D, D has none               an error: a misspelt folder must not start a run from scratch
    no --load                          a new run

A *run id* is random. A start from scratch creates it, and run.json of each checkpoint of the run has it.
"""

import difflib
import logging
import os
import secrets
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from ..checkpoint.load import latest, read_run
from ..checkpoint.lock import locked
from ..checkpoint.save_folder import check_vacant, move_aside, run_id_of
from ..config.training_options import CheckpointConfig
from ..errors import CheckpointError
from ..mpu.agree import on_one_rank
from ..mpu.group import Group

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Start:
    """step, run: of the checkpoint to load, and its run.json; None and {} for a start from scratch."""

    step: int | None
    run: dict
    run_id: str


def save_folder(checkpoint: CheckpointConfig, world: Group) -> AbstractContextManager:
    """Holds the lock of the --save folder, if one is given. Collective.

    Raises CheckpointError when another job uses the folder.
    """
    return nullcontext() if checkpoint.save is None else locked(Path(checkpoint.save), world)


def find_start(checkpoint: CheckpointConfig, world: Group) -> Start:
    """The start that rank 0 finds in the folders, on all ranks. Collective; called inside `save_folder`.

    Raises CheckpointError when there is nothing to load, or when --save holds another run.
    """
    def look() -> Start:
        start = _look(checkpoint)
        _check_save_folder(checkpoint, start)
        return start

    return on_one_rank(world, look)


def clear_save_folder(checkpoint: CheckpointConfig, world: Group) -> None:
    """With --overwrite-save, move another run in the folder into a subfolder. Collective; after the load."""
    if checkpoint.overwrite_save and not _continues_in_place(checkpoint):
        on_one_rank(world, lambda: move_aside(Path(checkpoint.save)) and None)


def _look(checkpoint: CheckpointConfig) -> Start:
    run_id = secrets.token_hex(4)
    if checkpoint.load is None:
        return Start(None, {}, run_id)
    step = latest(checkpoint.load)
    if step is None:
        _check_may_start(checkpoint)
        logger.info("%s holds no checkpoint: starting from scratch", checkpoint.load)
        return Start(None, {}, run_id)
    run = read_run(checkpoint.load, step)
    return Start(step, run, run_id if checkpoint.finetune else run_id_of(run) or run_id)


def _check_may_start(checkpoint: CheckpointConfig) -> None:
    """Raises CheckpointError unless the empty --load folder is also --save."""
    folder = Path(checkpoint.load)
    if checkpoint.exit_on_missing_checkpoint:
        raise CheckpointError(f"--load {folder}: no complete checkpoint there, and "
                              "--exit-on-missing-checkpoint is given. Check the path, or remove the flag to "
                              "start from scratch.")
    if checkpoint.save and _same_folder(folder, Path(checkpoint.save)):
        return
    what = "holds no checkpoint" if folder.is_dir() else "does not exist"
    names = [path.name for path in folder.parent.iterdir() if path.is_dir()] if folder.parent.is_dir() else []
    close = [str(folder.parent / name) for name in difflib.get_close_matches(folder.name, names)]
    hint = f" Did you mean {' or '.join(close)}?" if close and not folder.is_dir() else ""
    raise CheckpointError(f"--load {folder}: the folder {what}, and a start from scratch would look like a "
                          f"resumed run.{hint} Correct the path, or omit --load to start from scratch. To "
                          "start and resume with one command, give the same folder to --save and --load.")


def _check_save_folder(checkpoint: CheckpointConfig, start: Start) -> None:
    if checkpoint.save is None or checkpoint.overwrite_save or _continues_in_place(checkpoint):
        return
    from_there = checkpoint.load and _same_folder(Path(checkpoint.load), Path(checkpoint.save))
    if from_there:
        change = "Remove --finetune"
    elif checkpoint.load:
        change = f"Use --load {checkpoint.save}{' without --finetune' * checkpoint.finetune}"
    else:
        change = f"Add --load {checkpoint.save}"
    check_vacant(Path(checkpoint.save), start.run_id, start.step or 0, f"{change} to continue that run")


def _continues_in_place(checkpoint: CheckpointConfig) -> bool:
    return bool(checkpoint.load and checkpoint.save and not checkpoint.finetune
                and _same_folder(Path(checkpoint.load), Path(checkpoint.save)))


def _same_folder(one: Path, other: Path) -> bool:
    if one.exists() and other.exists():
        return one.samefile(other)
    return os.path.realpath(one) == os.path.realpath(other)
