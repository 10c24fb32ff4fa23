"""Load: find the checkpoint, read what it says of its run, fill pieces of any layout from it.

A rank reads the stored chunks that meet its pieces, whatever layout wrote them; there is no conversion.
"""

import logging
import os
from collections.abc import Collection, Iterable
from pathlib import Path

import torch

from ..errors import CheckpointError
from ..mpu.group import Group
from . import folder as folders
from .pieces import ParameterPiece, Piece
from .run_file import read_run_file
from .same_model import check_same_model
from .together import together

__all__ = ["latest", "read_run", "load", "load_weights", "check_same_model"]

logger = logging.getLogger(__name__)


def latest(directory: str | os.PathLike) -> int | None:
    """The step to load: what the tracker says, or, with a warning, the newest complete one if that is not loadable.

    None when there is no checkpoint. Raises CheckpointError when there are some and none is complete: to start afresh
    without a word would look like a resumed run.
    """
    from .index import is_complete

    folder = Path(directory)
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file: --load takes the directory that was given as --save.")
    if folders.is_ours(folder):
        raise CheckpointError(f"{folder} is a checkpoint itself: --load takes the directory above it, "
                              f"{folder.resolve().parent}. To load another than its newest, write the iteration into its "
                              f"{folders.TRACKER}.")
    wanted, steps = folders.read_tracker(folder), folders.steps_in(folder)
    if wanted is None and not steps:
        return None
    complete = lambda step: (path := folders.find(folder, step)) is not None and folders.is_ours(path) and is_complete(path)
    named = int(wanted) if wanted and wanted.isdecimal() else None
    if named is not None and complete(named):
        return named
    newest = next((step for step in reversed(steps) if step != named and complete(step)), None)
    if newest is None:
        raise CheckpointError(f"no complete checkpoint in {folder}: {_state(folder, wanted, steps)}. Starting afresh there "
                              "would look like resuming. Restore one, or give another folder.")
    logger.warning("%s; loading the newest complete checkpoint, iteration %d", _state(folder, wanted, steps), newest)
    return newest


def read_run(directory: str | os.PathLike, step: int) -> dict:
    """What `save` was given as `run`, with what `run_file.py` adds. Raises CheckpointError when it is not readable."""
    return read_run_file(find_checkpoint(directory, step))


def load(directory: str | os.PathLike, step: int, pieces: Iterable[Piece], *, tp: Group, world: Group,
         kinds: Collection[str] | None = None) -> None:
    """Fill the pieces in place, bit for bit; padding becomes zero. Copies of tied parameters are filled too.

    kinds   fill pieces of these kinds only ("weight", "exp_avg", ...); None means all

    Collective over `world`. Raises CheckpointError, the same on all ranks, listing each tensor that is missing or has
    another shape; nothing has been filled then.
    """
    wanted = (piece for piece in pieces if kinds is None or piece.kind in kinds)
    _fill(directory, step, wanted, tp, world, exact=True)


def load_weights(directory: str | os.PathLike, step: int, parameters: Iterable[torch.nn.Parameter], tp: Group) -> None:
    """Fill model parameters that carry a `.spec`, in whatever dtype they are, from the saved fp32 weights.

    For generation and evaluation, where there is no optimizer. Collective over `tp`.
    """
    pieces = [ParameterPiece(parameter.spec, parameter.detach().view(-1)) for parameter in parameters]
    _fill(directory, step, pieces, tp, world=tp, exact=False)


def _fill(directory: str | os.PathLike, step: int, pieces: Iterable[Piece], tp: Group, world: Group, exact: bool) -> None:
    from .storage import plan_reading

    what = f"cannot load iteration {step} from {directory}"
    readings = []       # stays on this rank; what an action returns travels
    together(world, what, lambda: readings.append(plan_reading(find_checkpoint(directory, step), pieces, tp, exact)))
    together(world, what, readings[0].run)


def find_checkpoint(directory: str | os.PathLike, step: int) -> Path:
    """Where it lies. Raises CheckpointError, naming those that there are."""
    path = folders.find(Path(directory), step)
    if path is None:
        raise CheckpointError(f"there is no checkpoint of iteration {step} in {directory}; there are iterations "
                              f"{', '.join(map(str, folders.steps_in(Path(directory)))) or 'none'}.")
    return path


def _state(folder: Path, wanted: str | None, steps: list[int]) -> str:
    tracker = "is missing" if wanted is None else f"says {wanted!r}, which is no complete checkpoint of ours"
    return f"{folder / folders.TRACKER} {tracker} (iterations there: {', '.join(map(str, steps)) or 'none'})"
