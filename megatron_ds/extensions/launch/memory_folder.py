"""`folder_in_memory`: the folder of an agent's files, in memory where there is such a place.

An agent that is killed leaves its folder. Each holds a lock as long as its agent lives, so the next agent finds by the
locks which folders are left over; process ids would not do, since containers may share the memory.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

PREFIX = "megatron-ds-"
LOCK = "lock"
MEMORY = Path("/dev/shm")


@contextlib.contextmanager
def folder_in_memory(memory: Path = MEMORY) -> Iterator[Path]:
    """Yield a new folder, and remove it at the end, with those of agents that were killed.

    memory: where folders never touch a disk, if that exists
    """
    parent = memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())
    _remove_left_over(parent)
    with tempfile.TemporaryDirectory(prefix=PREFIX, dir=parent) as name:
        folder = Path(name)
        with (folder / LOCK).open("x") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield folder


def _remove_left_over(parent: Path) -> None:
    """Remove this user's folders whose lock no process holds. Folders without a lock file stay."""
    for lock in parent.glob(f"{PREFIX}*/{LOCK}"):
        with contextlib.suppress(OSError):
            handle = os.open(lock, os.O_RDWR | os.O_NOFOLLOW)
            try:
                if os.fstat(handle).st_uid != os.getuid():
                    continue
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
            finally:
                os.close(handle)
