"""Where an engine's checkpoints lie, and which one a tag names.

dir/iter_0000010/, dir/latest_checkpointed_iteration.txt     saved without a tag: global_step10
dir/TAG/iter_0000010/, …                                     saved with one: a folder of its own, one
                                                             checkpoint
dir/latest                                                   the tag that was saved last; empty: the steps
                                                             in `dir` itself
"""

import logging
import os
import re
from pathlib import Path

from ...checkpoint.folder import is_ours, name_of, read_regular, steps_in
from ...checkpoint.load import find_checkpoint, latest, problem_of, read_run
from ...errors import CheckpointError, ConfigError

LATEST = "latest"
DEFAULT_TAG = re.compile(r"global_step(\d{1,18})")
logger = logging.getLogger(__name__)


def default_tag(step: int) -> str:
    """Return the tag of a checkpoint that is saved without one, as in DeepSpeed."""
    return f"global_step{step}"


def folder_of(directory: str | os.PathLike, tag: str | None) -> Path:
    """Return the folder with the checkpoint of a tag. Raises ConfigError for a tag that cannot name a folder."""
    if tag and (os.path.basename(tag) != tag or tag in (".", "..", LATEST)):
        raise ConfigError(
            f"tag {tag!r} is not the name of a folder in {directory}. Use letters, digits, - "
            "and _."
        )
    return Path(directory) / tag if tag else Path(directory)


def place_of(directory: str | os.PathLike, tag: str | None) -> tuple[Path, int | None]:
    """(folder, step) of the checkpoint of a tag; of the last one if it is None. step: None if there is none.

    A tag that has no folder of its own, global_step10, is step 10 in `directory` itself.
    Raises CheckpointError for a tag without a checkpoint.
    """
    # A tag with a folder of its own holds one checkpoint.
    named = last_tag(directory) if tag is None else tag
    folder = folder_of(directory, named)
    step = step_in_directory(directory, named)
    if step is None:
        found = latest(folder)
    # Without a tag the last checkpoint counts, even if the tag's file names another.
    elif tag is None:
        folder = Path(directory)
        found = latest(directory)
        if found not in (None, step):
            logger.warning(
                "%s names %s, but the last checkpoint in %s is iteration %d, which is loaded. To "
                "load the other, give tag=%r",
                LATEST,
                named,
                directory,
                found,
                named,
            )
    else:
        folder = Path(directory)
        found = _complete(Path(directory), step)
    # A tag that was asked for must exist.
    if found is None and tag is not None:
        raise CheckpointError(
            f"there is no checkpoint with the tag {tag!r} in {directory}. Tags there: "
            f"{', '.join(_tags(Path(directory))) or 'none'}."
        )
    return folder, found


def step_in_directory(directory: str | os.PathLike, tag: str | None) -> int | None:
    """Return the step that a tag without a folder names; None for any other tag."""
    # The whole tag: it has no separators of paths.
    match = DEFAULT_TAG.fullmatch(tag or "")
    if match is None or steps_in(folder_of(directory, tag)):
        return None
    step = int(match[1])
    return step if step in steps_in(Path(directory)) else None


def _complete(directory: Path, step: int) -> int:
    """`step`. Raises CheckpointError where its checkpoint is incomplete."""
    find_checkpoint(directory, step)
    if problem := problem_of(directory, step):
        raise CheckpointError(
            f"the checkpoint of {default_tag(step)} in {directory} cannot be loaded: "
            f"{problem}. Give another tag."
        )
    return step


def last_folder(directory: str | os.PathLike) -> Path:
    """Return the folder of the checkpoint that was saved last; `directory` itself where there is none."""
    tag = last_tag(directory)
    return (
        Path(directory)
        if step_in_directory(directory, tag) is not None
        else folder_of(directory, tag)
    )


def last_tag(directory: str | os.PathLike) -> str | None:
    """Return the tag of the last checkpoint; None where it has none."""
    try:
        return (
            read_regular(Path(directory) / LATEST).decode(errors="replace").strip()
            or None
        )
    except FileNotFoundError:
        return None


def check_vacant(folder: Path) -> None:
    """Raises CheckpointError for a training script's folder: its next start would load this checkpoint."""
    step = next(iter(reversed(steps_in(folder))), None)
    if (
        step is not None
        and is_ours(folder / name_of(step))
        and "engine" not in read_run(folder, step)
    ):
        raise CheckpointError(
            f"{folder} holds iteration {step} of a training script, and its next start "
            "would load this engine's checkpoint instead. Give another folder, or a tag."
        )


def _tags(directory: Path) -> list[str]:
    found = directory.iterdir() if directory.is_dir() else ()
    folders = [path.name for path in found if path.is_dir() and steps_in(path)]
    return sorted(folders) + list(map(default_tag, steps_in(directory)))
