"""Arrays that are built once and then mapped by every rank: index maps of datasets and blends.

An entry of the cache (`cache_entry.py`) is complete or absent, and is verified by checksums when it is
loaded. A damaged entry is built again.

Any number of processes may load an entry at the same time: the first one builds it under a file lock, and the
others wait and map the same pages. A process that dies releases the lock; its partial files have temporary
names and are removed by the next process that builds the entry. Ranks do not communicate, so no rank waits
for another that failed. Nodes with local disks build each entry once per node.
"""

import contextlib
import logging
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from .cache_entry import DamagedEntry, Entry

logger = logging.getLogger(__name__)
_warned: set[Path] = set()                      # folders that cannot be written, each reported once a process


def default_cache(prefix: str) -> Path:
    """The folder in which Megatron keeps index maps by default, next to the corpus."""
    return Path(prefix).parent / "cache" / "GPTDataset_indices"


def cached_arrays(directory: Path, title: str, key: Mapping[str, object], names: Sequence[str],
                  build: Callable[[], Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The arrays `names` of an entry, from the cache, or made by `build()` and stored.

    key: all that the values depend on (plain JSON values).  If the directory cannot be written, each process
    builds the arrays in memory, with a warning.
    """
    entry, arrays = Entry(directory, title, key, names), None
    with contextlib.suppress(DamagedEntry):                 # reported below, where it is built again
        if (found := entry.load(verify_large=False)) is not None:
            return found
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _locked(directory, title) as is_alone:
            if (found := _load(entry)) is not None:
                return found
            logger.info("building the indices of %s in %s", title, directory)
            start = time.monotonic()
            arrays = dict(build())
            built = time.monotonic()
            entry.store(arrays, is_alone)
    except OSError as e:
        return _in_memory(entry, arrays, e, build)
    logger.info("built the indices of %s: %.1f s, and %.1f s to write %.1f MiB", title, built - start,
                time.monotonic() - built, _mib(arrays))
    return _load(entry) or arrays


def _load(entry: Entry) -> dict[str, np.ndarray] | None:
    """The arrays; None if there are none, and, with a warning, if the entry is damaged."""
    try:
        return entry.load(verify_large=True)
    except DamagedEntry as e:
        logger.warning("the cached indices %s/%s-* cannot be used (%s): building them "
                       "again", entry.directory, entry.stem, e)
        return None


def _in_memory(entry: Entry, arrays: dict[str, np.ndarray] | None, error: OSError,
               build: Callable) -> dict[str, np.ndarray]:
    """Arrays that the cache cannot store, as on a full disk. Partial files have temporary names."""
    if arrays is None:                     # no lock: the folder may still be readable, and the entry complete
        if (found := _load(entry)) is not None:
            return found
        why = error.strerror or str(error)
    else:
        why = f"{error.strerror or error}; they take {_mib(arrays):.1f} MiB{_free(entry.directory)}"
    if entry.directory not in _warned:
        _warned.add(entry.directory)
        logger.warning("cannot store indices in %s (%s): each process builds them in memory. Free some "
                       "space, or name a writable folder with --data-cache-path.", entry.directory, why)
    return dict(build()) if arrays is None else arrays


def _mib(arrays: Mapping[str, np.ndarray]) -> float:
    return sum(array.nbytes for array in arrays.values()) / 2**20


def _free(directory: Path) -> str:
    try:
        return f", and {shutil.disk_usage(directory).free / 2**20:.1f} MiB are free"
    except OSError:
        return ""


@contextlib.contextmanager
def _locked(directory: Path, title: str):
    """Hold the directory's lock; yields whether it is held.

    On a file system without locks, two processes may build the same entry, which is harmless.
    """
    with open(directory / ".lock", "a") as f:
        yield _take(f, directory, title)                    # closing the file releases the lock


def _take(file, directory: Path, title: str) -> bool:
    try:
        import fcntl
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("waiting for another process to build the indices of %s in %s", title, directory)
            fcntl.flock(file, fcntl.LOCK_EX)
    except (ImportError, OSError) as e:
        logger.warning("no file lock in %s (%s): several processes may build the same indices", directory, e)
        return False
    return True
