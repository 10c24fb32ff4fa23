"""Arrays that are built once and mapped by every rank after: index maps of GPT datasets and blends.

A cache entry is some `.npy` files and a description, whose hash is in all their names:

    {md5}-{title}-description.txt       what it was built from; written last, so its presence says "complete"
    {md5}-{title}-document_index.npy    ...

Any number of processes may ask at once: the first builds under a file lock, the others wait and map the same pages. A
process that dies lets go of the lock, and what it left half-written has another name, which the next one that builds the same
removes. No communication between ranks is needed, so none can be left waiting. On disks of their own, nodes build each once.
"""

import contextlib
import functools
import hashlib
import json
import logging
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

logger = logging.getLogger(__name__)


def cached_arrays(directory: Path, title: str, key: Mapping[str, object], names: Sequence[str],
                  build: Callable[[], Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The arrays `names` that `build()` makes from what `key` describes, from the cache when they are there.

    key: everything the values depend on (plain JSON values). Where the directory cannot be written, the arrays are built
    in memory, with a warning.
    """
    description = json.dumps(key, indent=4, sort_keys=True)
    stem = f"{hashlib.md5(description.encode(), usedforsecurity=False).hexdigest()}-{title}"
    found = _load(directory, stem, description, names)
    if found is not None:
        return found
    arrays = None
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _locked(directory, title) as is_alone:
            found = _load(directory, stem, description, names)
            if found is not None:
                return found
            logger.info("building the indices of %s in %s", title, directory)
            start = time.monotonic()
            arrays = dict(build())
            built = time.monotonic()
            _store(directory, stem, description, arrays, is_alone)
    except OSError as e:
        _warn_once(directory, e.strerror)                  # a full disk, too: what was written of it has another name
        return dict(build()) if arrays is None else arrays
    logger.info("built the indices of %s: %.1f s, and %.1f s to write %.1f MiB", title, built - start,
                time.monotonic() - built, sum(a.nbytes for a in arrays.values()) / 2**20)
    return _load(directory, stem, description, names) or arrays


@functools.cache
def _warn_once(directory: Path, why: str) -> None:
    logger.warning("cannot keep indices in %s (%s): each process builds them in memory. Name a writable folder with "
                   "--data-cache-path.", directory, why)


def _load(directory: Path, stem: str, description: str, names: Sequence[str]) -> dict[str, np.ndarray] | None:
    try:
        if (directory / f"{stem}-description.txt").read_text() != description:
            return None
        # `np.asarray` drops the memmap class, whose every small index costs microseconds; the pages stay mapped.
        return {n: np.asarray(np.load(directory / f"{stem}-{n}.npy", mmap_mode="r")) for n in names}
    except FileNotFoundError:
        return None
    except (ValueError, EOFError, OSError) as e:
        logger.warning("the cached indices %s/%s-* are damaged (%s): building them again", directory, stem, e)
        return None


def _store(directory: Path, stem: str, description: str, arrays: Mapping[str, np.ndarray], is_alone: bool) -> None:
    if is_alone:
        for left_behind in directory.glob(f".{stem}-*"):    # by a process that was killed
            left_behind.unlink(missing_ok=True)
    done = directory / f"{stem}-description.txt"
    done.unlink(missing_ok=True)
    for name, value in arrays.items():
        _write(directory / f"{stem}-{name}.npy", lambda f, value=value: np.save(f, value))
    _write(done, lambda f: f.write(description.encode()))


def _write(path: Path, write: Callable) -> None:
    """Write beside, then rename: a name never stands for half a file."""
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with open(beside, "wb") as f:
            write(f)
            f.flush()
            os.fsync(f.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


@contextlib.contextmanager
def _locked(directory: Path, title: str):
    """Hold the directory's lock; yields whether it is held.

    Where the file system has none, go on: two may then build the same, which is harmless.
    """
    with open(directory / ".lock", "a") as f:
        yield _take(f, directory, title)                    # closing the file lets go of the lock


def _take(file, directory: Path, title: str) -> bool:
    try:
        import fcntl
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("waiting for the process that builds indices in %s, for those of %s", directory, title)
            fcntl.flock(file, fcntl.LOCK_EX)
    except (ImportError, OSError) as e:
        logger.warning("no file lock in %s (%s): several processes may build the same indices", directory, e)
        return False
    return True
