"""`KnownSaves`: the newest checkpoints of folders that a run has found, loaded or written.

A job that was suspended may continue after another job has saved into its folder and ended. Nothing else
then shows that the folder has changed: the other job's lock is gone. So a run compares the newest checkpoint
with those it knows before it publishes one.
"""

import json
import zlib
from pathlib import Path

from ..errors import CheckpointError
from . import folder as folders


class KnownSaves:
    """For each folder, step → identifier of each checkpoint that was the newest when the run looked.

    For rank 0.
    """

    def __init__(self) -> None:
        self._known: dict[Path, dict[int, str]] = {}

    def look(self, folder: Path) -> None:
        """Take the newest checkpoint that is there now as known."""
        known = self._known.setdefault(folder.resolve(), {})
        if steps := folders.steps_in(folder):
            known[steps[-1]] = identifier_of(folder, steps[-1])

    def check(self, folder: Path) -> None:
        """Raises CheckpointError if the newest checkpoint is not known. The first call for a folder looks.

        One before the last known step is accepted: it is the newest after the user has deleted later ones.
        """
        if folder.resolve() not in self._known:
            self.look(folder)
        steps = folders.steps_in(folder)
        known = self._known[folder.resolve()]
        if not steps or steps[-1] < max(known, default=0):
            return
        if known.get(steps[-1]) == identifier_of(folder, steps[-1]):
            return
        path = folders.find(folder, steps[-1])
        raise CheckpointError(
            f"{path} was saved by another job while this one was suspended or cut off from the file system: "
            f"this run has neither written nor loaded it. Saving now would mix two runs, so nothing more is "
            f"written to {folder}. Start again with --load {folder} to continue from iteration {steps[-1]}, "
            "or give another folder."
        )


def identifier_of(folder: Path, step: int) -> str:
    """The random save_id of a checkpoint; a checksum of its run.json where that has none."""
    path = folders.find(folder, step)
    try:
        content = folders.read_regular(path / folders.RUN_FILE)
        return str(json.loads(content)["save_id"])
    except (OSError, CheckpointError):
        return ""
    except (ValueError, KeyError, TypeError, RecursionError):
        return f"{zlib.crc32(content):08x}"
