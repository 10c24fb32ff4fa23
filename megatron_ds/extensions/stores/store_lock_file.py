"""The lock file of a store: an object that a store changes only on a condition."""

import json
from collections.abc import Callable

from ...checkpoint.lock_file import LOCK, LockFile, lock_file
from . import store_objects as objects
from .store_path import UPath


class StoreLockFile(LockFile):
    """`LockFile` with the operations of a store.

    All are conditional (`store_objects.py`): of two jobs one fails to create the object, and a renewal or a removal
    that arrives after another job has taken over changes nothing. Each renewal writes another content, so that a job
    that has read the former one notices it.
    """

    def __init__(self, folder: UPath, token: str):
        self.path: UPath = folder / LOCK
        self._clock = folder / f"{LOCK}.{token}.now"
        self._text = ""
        self._beats = 0
        self._found: objects.ReadObject | None = None

    def create(self, text: str) -> bool:
        """Create the object. False when there is one already."""
        self._text = text
        return objects.write(self.path, text.encode(), None)

    def read(self) -> tuple[bytes, int] | None:
        """(content, time of the last write in ns); None when there is none."""
        try:
            self._found = objects.read(self.path)
            if self._found is None:
                return None
            return self._found.content, _time_of(self.path)
        except FileNotFoundError:
            return None

    def touch(self) -> bool:
        """Write the object that was read last again, which renews its time. False if it was replaced."""
        self._beats += 1
        content = json.loads(self._text) | {"beats": self._beats}
        return objects.write(self.path, json.dumps(content).encode(), self._found)

    def delete(self) -> None:
        """Remove the object that was read last."""
        if self._found:
            objects.remove(self.path, self._found)

    def take_away(self, is_expected: Callable[[bytes], bool]) -> None:
        """Remove the object if its content is the expected one."""
        found = objects.read(self.path)
        if found and is_expected(found.content):
            objects.remove(self.path, found)

    def now(self) -> int:
        """Return the clock of the store, in ns."""
        self._clock.write_bytes(b"")
        try:
            return _time_of(self._clock)
        finally:
            self._clock.unlink()

    def look_again(self) -> None:
        """Do nothing: a store does not remember that an object was missing."""

    def check(self) -> None:
        """Do nothing: a store has no links."""


@lock_file.register
def _(folder: UPath, token: str) -> StoreLockFile:
    return StoreLockFile(folder, token)


def _time_of(path: UPath) -> int:
    return int(path.fs.modified(path.path).timestamp() * 1e9)
