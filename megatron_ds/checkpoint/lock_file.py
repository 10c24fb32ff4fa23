"""`LockFile`: the file of a lock (`lock.py`), which one process at a time creates.

In a file system it is written under a temporary name and hard-linked. The link is atomic, on NFS too, and fails if
there is a lock. (flock is not used: it may not reach other machines, and forked workers keep it after their parent
was killed.) A feature has the one of a store.
"""

import contextlib
import os
from collections.abc import Callable
from functools import singledispatch
from pathlib import Path

from ..errors import CheckpointError
from .folder import naming, read_regular

LOCK = ".lock"


class LockFile:
    """The file of the lock of `folder`. token: of this process, part of the names of temporary files."""

    def __init__(self, folder: Path, token: str):
        self.path = folder / LOCK
        self._folder = folder
        self._token = token

    def create(self, text: str) -> bool:
        """Create the file. False when there is one already."""
        beside = self._beside("")
        _write_new(beside, text)
        try:
            os.link(beside, self.path)
        except FileExistsError:
            return False
        except OSError:  # a file system without links
            return _write_new(self.path, text)
        finally:
            beside.unlink()
        return True

    def read(self) -> tuple[bytes, int] | None:
        """(content, time of the last `touch` in ns); None when there is none."""
        return self._read(self.path)

    def touch(self) -> bool:
        """Renew the time of the file that was read last. False if it is gone, or, in a store, replaced."""
        try:
            os.utime(self.path)
        except FileNotFoundError:
            return False
        return True

    def delete(self) -> None:
        """Remove the file. Raises FileNotFoundError."""
        self.path.unlink()

    def take_away(self, is_expected: Callable[[bytes], bool]) -> None:
        """Remove the file if its content is the expected one. A rename precedes, since another job may replace it."""
        aside = self._beside(".old")
        with contextlib.suppress(FileNotFoundError):
            os.rename(self.path, aside)
            if (found := self._read(aside)) and not is_expected(found[0]):
                self._put_back(aside)
            aside.unlink()

    def now(self) -> int:
        """Return the file server's clock, which stamps the files of this folder, in ns."""
        probe = self._beside(".now")
        probe.touch()
        try:
            return probe.stat().st_mtime_ns
        finally:
            probe.unlink()

    def look_again(self) -> None:
        """Have the system forget that the file was missing: NFS remembers it for a while."""
        with contextlib.suppress(FileNotFoundError):
            os.listdir(self._folder)

    def check(self) -> None:
        """Raise CheckpointError if the name is a broken link."""
        if self.path.is_symlink():
            raise CheckpointError(f"{self.path} is a broken link. Delete it.")

    def _beside(self, end: str) -> Path:
        return self._folder / f"{LOCK}.{self._token}{end}"

    def _read(self, path: Path) -> tuple[bytes, int] | None:
        try:
            return read_regular(path), path.stat().st_mtime_ns
        except FileNotFoundError:
            return None

    def _put_back(self, aside: Path) -> None:
        try:
            os.link(aside, self.path)
        except FileExistsError:
            pass
        except OSError:  # a file system without links
            _write_new(self.path, read_regular(aside).decode())


@singledispatch
def lock_file(folder: Path, token: str) -> LockFile:
    """Return the lock file of a folder, or of a place in a store."""
    return LockFile(folder, token)


def _write_new(path: Path, text: str) -> bool:
    """Create a file. False when there is one already."""
    try:
        handle = os.open(
            path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o644
        )
    except FileExistsError:
        return False
    with naming(path), open(handle, "w") as file:
        file.write(text)
    return True
