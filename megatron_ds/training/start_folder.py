"""What the folders of --load and --save hold, and whether a run may begin with them."""

import difflib
import logging
import os
from dataclasses import replace
from pathlib import Path

from ..checkpoint.load import latest, read_run
from ..checkpoint.place import is_store, place_of
from ..checkpoint.save_folder import check_vacant, move_aside, run_id_of
from ..config.options.training import CheckpointConfig
from ..errors import CheckpointError, MismatchError
from ..mpu.agree import on_one_rank
from ..mpu.group import Group
from .foreign_checkpoints import foreign_checkpoints
from .found_checkpoints import has_checkpoint
from .start import Start, known_folder, new_run_id

logger = logging.getLogger(__name__)


def find_weights(checkpoint: CheckpointConfig) -> Start:
    """Return the checkpoint in the --load folder, whose weights are taken. Raises CheckpointError if there is
    none.
    """
    folder = checkpoint.load
    if not has_checkpoint(folder, checkpoint.load_format):
        raise CheckpointError(
            f"--pretrained-checkpoint {folder}: no complete checkpoint there. Give the folder that was --save of the "
            "run that trained the weights, or a folder of another program's checkpoint."
        )
    start = start_in(checkpoint)
    # The identifier of the run that trained them.
    return replace(start, run_id=run_id_of(start.run) or "")


def clear_save_folder(given: CheckpointConfig, world: Group) -> None:
    """Move another run in the folder into a subfolder if --overwrite-save is given. Collective; after the
    load. given: the options of the user"""
    if given.overwrite_save and not _continues_in_place(given):
        on_one_rank(world, lambda: _move_aside(known_folder(given.save)))


def _move_aside(save: str) -> None:
    if is_store(save):
        raise CheckpointError(
            f"--save {save} --overwrite-save: a store cannot rename the checkpoints that are there. Give another "
            "--save, or move them with the tools of the store."
        )
    move_aside(Path(save))


def start_in(checkpoint: CheckpointConfig) -> Start:
    """Return the start that the --load folder gives, if there is one. Raises CheckpointError."""
    run_id = new_run_id()
    if checkpoint.load is None:
        return Start(None, {}, run_id)
    of_others = foreign_checkpoints(checkpoint.load)
    if foreign := of_others.format_of_folder(checkpoint.load, checkpoint.load_format):
        return Start(None, {}, run_id, foreign)
    step = latest(checkpoint.load)
    if step is None:
        check_may_start(checkpoint)
        logger.info("%s holds no checkpoint: starting from scratch", checkpoint.load)
        return Start(None, {}, run_id)
    run = read_run(checkpoint.load, step)
    return Start(step, run, run_id if checkpoint.finetune else run_id_of(run) or run_id)


def check_may_start(checkpoint: CheckpointConfig) -> None:
    """Raises MismatchError unless the --load folder, which holds no checkpoint, is also --save."""
    folder = place_of(known_folder(checkpoint.load))
    if checkpoint.exit_on_missing_checkpoint:
        raise MismatchError(
            f"--load {folder}: no complete checkpoint there, and "
            "--exit-on-missing-checkpoint is given. Check the path, or remove the flag to "
            "start from scratch."
        )
    if checkpoint.save and _same_folder(folder, place_of(checkpoint.save)):
        return
    # The names of folders beside it may show a misspelling.
    what = "holds no checkpoint" if folder.is_dir() else "does not exist"
    names = (
        [path.name for path in folder.parent.iterdir() if path.is_dir()]
        if folder.parent.is_dir()
        else []
    )
    close = [
        str(folder.parent / name)
        for name in difflib.get_close_matches(folder.name, names)
    ]
    hint = (
        f" Did you mean {' or '.join(close)}?" if close and not folder.is_dir() else ""
    )
    raise MismatchError(
        f"--load {folder}: the folder {what}, and a start from scratch would look like a "
        f"resumed run.{hint} Correct the path, or omit --load to start from scratch. To "
        "start and resume with one command, give the same folder to --save and --load."
    )


def check_save_folder(given: CheckpointConfig, start: Start) -> None:
    """Raises CheckpointError if the --save folder holds another run. given: the options of the user"""
    if given.save is None or given.overwrite_save or _continues_in_place(given):
        return
    to_continue, to_begin = _advice_of_save_folder(given)
    check_vacant(
        place_of(given.save), start.run_id, start.step or 0, to_continue, to_begin
    )


def _advice_of_save_folder(given: CheckpointConfig) -> tuple[str, str]:
    """Return how to continue the run in the --save folder, and how to begin it again if it has no checkpoint."""
    save = known_folder(given.save)
    load = given.load
    is_same = load and _same_folder(place_of(load), place_of(save))
    change = f"Add --load {save}"
    if is_same:
        change = "Remove --finetune"
    elif load:
        change = f"Use --load {save}"
    to_begin = f"{change} to start that run again from scratch, as it has no checkpoint"
    if load and given.finetune and not is_same:
        change += " without --finetune"
        to_begin = (
            f"Use --pretrained-checkpoint {load} --load {save} in place of --load {load} --finetune to start that "
            "run again from these weights, as it has no checkpoint"
        )
    return f"{change} to continue that run", to_begin


def _continues_in_place(checkpoint: CheckpointConfig) -> bool:
    return bool(
        checkpoint.load
        and checkpoint.save
        and not checkpoint.finetune
        and _same_folder(place_of(checkpoint.load), place_of(checkpoint.save))
    )


def _same_folder(one: Path, other: Path) -> bool:
    if one.exists() and other.exists():
        return one.samefile(other)
    return os.path.realpath(one) == os.path.realpath(other)
