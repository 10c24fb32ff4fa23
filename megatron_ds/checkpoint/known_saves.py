"""`KnownSaves`: the newest checkpoints of folders that a run has found, loaded or written.

A job that was suspended may continue after another job has saved into its folder and ended. Nothing else
then shows that the folder has changed: the other job's lock is gone. So a run compares the newest checkpoint
with those it knows before it publishes one.
"""

import json
import os
import time
import zlib
from pathlib import Path

from ..errors import CheckpointError
from . import folder as folders

PAUSES = (0.1, 1.0, 5.0)  # seconds before a read that failed is tried again


# (pid, folder, step) → save_id of the checkpoint that this process has written last.
_written: dict[tuple[int, Path, int], str] = {}


def written_here(folder: Path, step: int) -> str | None:
    """Return the save_id of a checkpoint that this process has written; None if it wrote none."""
    return _written.get((os.getpid(), folder.resolve(), step))


class KnownSaves:
    """For each folder, step → identifiers of the checkpoints that the run wrote, or found to be the newest.

    For rank 0.
    """

    def __init__(self) -> None:
        self._known: dict[Path, dict[int, set[str | None]]] = {}

    def look(self, folder: Path) -> None:
        """Take the newest checkpoint that is there now as known."""
        self._known.setdefault(folder.resolve(), {})
        if steps := folders.steps_in(folder):
            self._add(folder, steps[-1], identifier_of(folder, steps[-1]))

    def wrote(self, folder: Path, step: int, save_id: str) -> None:
        """Take the checkpoint that this run is about to publish as known, without reading it."""
        self._add(folder, step, save_id)
        _written[os.getpid(), folder.resolve(), step] = save_id

    def check(self, folder: Path) -> None:
        """Raises CheckpointError if the newest checkpoint is not known, or cannot be read. The first call for a
        folder looks.

        One before the last known step is accepted: it is the newest after the user has deleted later ones.
        """
        if folder.resolve() not in self._known:
            self.look(folder)
        steps = folders.steps_in(folder)
        known = self._known[folder.resolve()]
        last = max(known, default=0)
        if not steps or steps[-1] < last:
            return
        found = identifier_of(folder, steps[-1])
        if found in known.get(steps[-1], ()):
            return
        path = folders.find(folder, steps[-1]) or folder / folders.name_of(steps[-1])
        if found is None and steps[-1] in known:
            raise _unreadable(path, "it is gone")
        raise CheckpointError(
            f"{path} was saved by another job while this one was suspended or cut off from the file system: "
            f"this run has neither written nor loaded it. Saving now would mix two runs, so nothing more is "
            f"written to {folder}. Start again with --load {folder} to continue from iteration {steps[-1]}, "
            "or give another folder."
        )

    def _add(self, folder: Path, step: int, identifier: str | None) -> None:
        of_steps = self._known.setdefault(folder.resolve(), {})
        of_steps.setdefault(step, set()).add(identifier)


def identifier_of(folder: Path, step: int) -> str | None:
    """Return the random save_id of a checkpoint, or a checksum of its run.json where that has none; None if either
    is gone.

    A read that fails is tried again. Raises CheckpointError when the last one fails.
    """
    path = folders.find(folder, step)
    if path is None:
        return None
    for pause in (*PAUSES, None):
        try:
            return _identifier_in(folders.read_regular(path / folders.RUN_FILE))
        except FileNotFoundError:
            return None
        except (OSError, CheckpointError) as error:
            if pause is None:
                raise _unreadable(path, error) from error
        time.sleep(pause)
    raise AssertionError("the last attempt returns or raises")


def _identifier_in(content: bytes) -> str:
    try:
        return str(json.loads(content)["save_id"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return f"{zlib.crc32(content):08x}"


def _unreadable(path: Path, why: object) -> CheckpointError:
    return CheckpointError(
        f"{path / folders.RUN_FILE} cannot be read ({why}), so it is not known whether another job has saved "
        f"there. Nothing is written. Check the file system, then start again with --load to continue from {path}."
    )
