"""Which checkpoints to keep. Deletes only after the new one is durable and the tracker points to it."""

import logging
from collections.abc import Iterable
from pathlib import Path

from . import folder as folders

logger = logging.getLogger(__name__)


def to_delete(steps: Iterable[int], saved: int, limit: int | None) -> list[int]:
    """Of the complete checkpoints `steps`, those that go when `saved` was just written and `limit` may stay; None keeps all.

    Later steps belong to a timeline that the user went back from by editing the tracker. They are not counted and not
    touched: counting them as the newest would delete the run in progress.
    """
    if limit is None:
        return []
    assert limit >= 1, f"keeping {limit} checkpoints would delete the one just written"
    return sorted(step for step in set(steps) if step <= saved)[:-limit]


def prune(folder: Path, saved: int, limit: int | None) -> None:
    """Delete what `to_delete` names; directories that another program wrote are left alone.

    A checkpoint that cannot be deleted is a warning: the new one is safe, and training should go on.
    """
    ours = [step for step in folders.steps_in(folder) if folders.is_ours(folder / folders.name_of(step))]
    for step in to_delete(ours, saved, limit):
        try:
            folders.delete(folder, step)
        except OSError as error:
            logger.warning("could not delete the old checkpoint %s: %s", folder / folders.name_of(step), error)
