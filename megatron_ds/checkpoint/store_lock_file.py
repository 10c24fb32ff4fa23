"""The lock file of a store: an object that a store creates only if there is none."""

import contextlib
from collections.abc import Callable

from upath import UPath

from .lock_file import LOCK, lock_file


class StoreLockFile:
    """`LockFile` with the operations of a store.

    The creation is a conditional write (`If-None-Match` of S3, generation 0 of Google's store), which fails on one of
    two jobs. A store has no rename: `take_away` compares and removes in two operations, and a holder finds at its next
    beat, and before it publishes, whether the lock is still its own.
    """

    def __init__(self, folder: UPath, token: str):
        self.path = folder / LOCK
        self._clock = folder / f"{LOCK}.{token}.now"
        self._text = ""

    def create(self, text: str) -> bool:
        """Create the object. False when there is one already."""
        self._text = text
        try:
            self.path.fs.pipe_file(self.path.path, text.encode(), mode="create")
        except FileExistsError:
            return False
        return True

    def read(self) -> tuple[bytes, int] | None:
        """(content, time of the last write in ns); None when there is none."""
        try:
            return self.path.read_bytes(), _time_of(self.path)
        except FileNotFoundError:
            return None

    def touch(self) -> None:
        """Write the object again: its time is that of the last write."""
        self.path.write_text(self._text)

    def delete(self) -> None:
        """Remove the object."""
        self.path.unlink()

    def take_away(self, is_expected: Callable[[bytes], bool]) -> None:
        """Remove the object if its content is the expected one."""
        found = self.read()
        if found and is_expected(found[0]):
            with contextlib.suppress(FileNotFoundError):
                self.path.unlink()

    def now(self) -> int:
        """The clock of the store, in ns."""
        self._clock.write_bytes(b"")
        try:
            return _time_of(self._clock)
        finally:
            self._clock.unlink()

    def look_again(self) -> None:
        """A store remembers nothing of a missing object."""

    def check(self) -> None:
        """A store has no links."""


@lock_file.register
def _(folder: UPath, token: str) -> StoreLockFile:
    return StoreLockFile(folder, token)


def _time_of(path: UPath) -> int:
    return int(path.fs.modified(path.path).timestamp() * 1e9)
