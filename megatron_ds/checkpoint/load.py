"""Load a checkpoint: find it, read its run.json, compare models, fill pieces of any layout.

A rank reads the stored chunks that intersect its pieces, whichever layout wrote them; there is no conversion.
"""

import json
import logging
import os
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from ..errors import CheckpointError
from ..mpu.agree import FailureWords, gather_from_all_ranks, on_all_ranks, on_one_rank
from ..mpu.group import Group
from ..mpu.param_spec import Coordinates
from . import folder as folders
from .pieces import Piece
from .place import place_of
from .run_file import read_run_file

logger = logging.getLogger(__name__)

MOST_DIGITS = 18  # of a step
MOST_REASONS = 3  # number of incomplete checkpoints whose problems a message lists
ABSENT = "(absent)"


def latest(directory: str | os.PathLike) -> int | None:
    """Return the step to load: the tracker's, or with a warning the newest complete one if that cannot be loaded.

    None when there is no checkpoint. Raises CheckpointError when there are some and none is complete, since a
    silent start from scratch would look like a resumed run.
    """
    folder = place_of(directory)
    folders.check_reachable(folder)
    # A user may give a path that is one level too deep, or a file.
    check_directory(folder)
    if folders.is_ours(folder):
        raise CheckpointError(
            f"{folder} is a checkpoint itself: --load takes the directory above it, "
            f"{folder.resolve().parent}. To load an earlier one, write its iteration into "
            f"{folders.TRACKER} there."
        )
    wanted = folders.read_tracker(folder)
    steps = folders.steps_in(folder)
    if wanted is None and not steps:
        return None
    # The step of the tracker is tried first, then the others from the newest.
    named = (
        int(wanted)
        if wanted and wanted.isdecimal() and len(wanted) <= MOST_DIGITS
        else None
    )
    problems: list[str] = []
    found = None
    for step in dict.fromkeys([*([] if named is None else [named]), *reversed(steps)]):
        problem = problem_of(folder, step)
        if problem is None:
            found = step
            break
        problems.append(problem)
    state = _state_text(folder, wanted, steps, problems)
    if found is None:
        raise CheckpointError(
            f"no complete checkpoint in {folder}: {state}. Starting from scratch there "
            "would look like resuming. Restore a checkpoint, or give another folder."
        )
    if found != named:
        logger.warning(
            "%s. Loading the newest complete checkpoint, iteration %d", state, found
        )
    return found


def check_directory(folder: Path) -> None:
    """Raises CheckpointError for a file."""
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(
            f"{folder} is a file: --load takes the directory that was given as --save."
        )


def _state_text(
    folder: Path, wanted: str | None, steps: Sequence[int], problems: Sequence[str]
) -> str:
    """Everything that was wrong in the folder. wanted: text of the tracker; steps: of the checkpoints there."""
    tracker = (
        "is missing"
        if wanted is None
        else f"names {wanted!r}, which is not a complete checkpoint"
    )
    there = ", ".join(map(str, steps)) or "none"
    state = "; ".join(
        [
            f"{folder / folders.TRACKER} {tracker} (iterations there: {there})",
            *problems[:MOST_REASONS],
        ]
    )
    if len(problems) > MOST_REASONS:
        state += f"; and {len(problems) - MOST_REASONS} more are incomplete"
    return state


def problem_of(folder: Path, step: int) -> str | None:
    """Return why the checkpoint of `step` cannot be loaded, as far as index and run.json show; None when it can.

    Only the sizes of tensor files are compared. Their checksums are compared when they are loaded.
    """
    from .index import read_index

    path = folders.find(folder, step)
    if path is None:
        return f"there is no {folders.name_of(step)}"
    try:
        read_index(path)
    except CheckpointError as error:
        return str(error).rstrip(".")
    return None


def read_run(directory: str | os.PathLike, step: int) -> dict:
    """Return the values in run.json: `run` of `save`, and those that `run_file.py` adds."""
    return read_run_file(find_checkpoint(directory, step))


def load(
    directory: str | os.PathLike,
    step: int,
    pieces: Iterable[Piece],
    *,
    coordinates: Coordinates,
    world: Group,
    kinds: Collection[str] | None = None,
    exact: bool = True,
) -> None:
    """Fill the pieces, also tied copies, with the saved values, bit for bit; padding becomes zero.

    kinds   fill pieces of these kinds only ("weight", "exp_avg", ...); None means all
    exact   refuse values of another dtype than the piece; otherwise they are rounded to it

    Collective over `world`. Raises the same CheckpointError on all ranks, listing each tensor that is missing
    or has another shape; no piece has been changed then.
    """
    from .storage import Reader, Reading

    folder = place_of(directory)
    wanted = (piece for piece in pieces if kinds is None or piece.kind in kinds)
    failing: FailureWords = {
        "doing": f"cannot load iteration {step} from {directory}",
        "kind": CheckpointError,
    }
    # The reading stays on this rank, unlike the return value of `plan`, which is gathered.
    readings = []

    def plan() -> tuple[bool, str]:
        path = find_checkpoint(folder, step)
        with explain_way_back(folder, step):
            reader = Reader(path)
        readings.append(Reading(reader, wanted, coordinates, exact))
        return reader.has_checksums, _save_of(path)

    def fill() -> None:
        with explain_way_back(folder, step):
            readings[0].run()

    # All ranks check what they will read before any of them changes a tensor.
    seen = gather_from_all_ranks(world, plan, **failing)
    on_one_rank(world, lambda: _check_same_save([save for _, save in seen]), **failing)
    if not all(has_checksums for has_checksums, _ in seen) and world.rank == 0:
        logger.warning(
            "%s was saved in format 1, without checksums of its files: not all changed bytes and "
            "files of other saves can be detected",
            find_checkpoint(folder, step),
        )
    on_all_ranks(world, fill, **failing)


def _save_of(path: Path) -> str:
    """Return an identifier of the save: its save_id, or in format 1 a checksum of its index and its run.json."""
    if save_id := read_run_file(path).get("save_id"):
        return save_id
    contents = (
        folders.read_regular(path / name)
        for name in (folders.INDEX_FILE, folders.RUN_FILE)
    )
    return f"{zlib.crc32(b''.join(contents)):08x}"


def _check_same_save(saves: Sequence[str]) -> None:
    """Raises CheckpointError unless all ranks see the same save. saves: identifiers in rank order."""
    others = [rank for rank, save in enumerate(saves) if save != saves[0]]
    if others:
        raise CheckpointError(
            f"rank(s) {', '.join(map(str, others[:8]))} of {len(saves)} see another save "
            "under this name than rank 0: the folder is not on a file system that all "
            "ranks share, or its copies differ. Loading would mix two saves. Give a folder "
            "that all ranks share."
        )


@contextmanager
def explain_way_back(folder: Path, step: int) -> Iterator[None]:
    """Add to the error of a damaged checkpoint which earlier one can be loaded instead, and how."""
    try:
        yield
    except CheckpointError as error:
        earlier = [
            other for other in reversed(folders.steps_in(folder)) if other < step
        ]
        intact = next(
            (other for other in earlier if problem_of(folder, other) is None), None
        )
        if intact is None:
            advice = f"{folder} has no earlier complete checkpoint"
        else:
            advice = (
                f"To go back to iteration {intact}, the last complete one before it, write {intact} "
                f"into {folder / folders.TRACKER}"
            )
        raise CheckpointError(f"{str(error).rstrip('.')}. {advice}.") from error


def find_checkpoint(directory: str | os.PathLike, step: int) -> Path:
    """Path of the checkpoint of `step`. Raises CheckpointError listing the others if there is none."""
    folder = place_of(directory)
    path = folders.find(folder, step)
    if path is None:
        raise CheckpointError(
            f"there is no checkpoint of iteration {step} in {directory}; there are "
            "iterations "
            f"{', '.join(map(str, folders.steps_in(folder))) or 'none'}."
        )
    return path


def check_same_model(saved: Mapping, current: Mapping) -> None:
    """Raises CheckpointError naming the fields, with both values, in which two nested dicts differ."""
    if differing := differences(saved, current):
        raise CheckpointError(
            f"the checkpoint belongs to another run: {'; '.join(differing)}. Loading it "
            "would train a different model or on different data. Give the flags it was "
            "saved with (its run.json works as --config), or another --load."
        )


def differences(saved: Mapping, current: Mapping) -> list[str]:
    """Return the fields in which two nested dicts differ, each with both values."""
    theirs = dict(_flat(saved))
    ours = dict(_flat(current))
    return [
        f"{name}: checkpoint {_show(theirs, name)}, this run {_show(ours, name)}"
        for name in sorted(theirs | ours)
        if theirs.get(name, ABSENT) != ours.get(name, ABSENT)
    ]


def _flat(values: Mapping, prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            # Tuples become lists, as in run.json.
            yield (
                f"{prefix}{name}",
                json.loads(json.dumps(value)),
            )


def _show(values: Mapping, name: str) -> str:
    return repr(values[name]) if name in values else ABSENT
