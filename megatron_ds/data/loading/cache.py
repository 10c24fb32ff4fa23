"""Arrays that are built once and then mapped by every rank: index maps of datasets and blends.

An entry of the cache is complete or absent, and is verified by checksums when it is loaded. A damaged entry
is built again.

Any number of processes may load an entry at the same time: the first one builds it under a file lock, and the
others wait and map the same pages. A process that dies releases the lock; its partial files have temporary
names and are removed by the next process that builds the entry. Ranks do not communicate, so no rank waits
for another that failed. Nodes with local disks build each entry once per node.

The files of an entry:

    {md5}-{title}-description.txt       the key, then a line of JSON with the checksums; written last
    {md5}-{title}-document_index.npy    ...
    .{md5}-{title}-verified             size, times, inode of each array, verified; large entries only

Every file has a CRC-32 for each block of 16 MiB, computed when it is built. An entry of up to ALWAYS_BYTES is
verified each time a process loads it. A larger entry is verified by the first process; the `-verified` file
shows the others that the arrays have not been written or replaced since, so that 1,000 ranks do not read them
1,000 times. Damage below the file system, which changes no time stamp, is therefore noticed in small entries
only.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import time
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypedDict

import numpy as np

from ...errors import DataError
from ...host.regular_file import open_regular, read_regular


class Sums(TypedDict):
    """The size of a file, and the CRC-32 of each of its blocks in hexadecimal digits."""

    bytes: int
    crc32: list[str]


logger = logging.getLogger(__name__)
BLOCK_BYTES = 1 << 24
CHUNK_BYTES = 1 << 20  # read at a time, by each of THREADS
THREADS = 8  # zlib releases the interpreter lock
ALWAYS_BYTES = 1 << 26  # bytes that are read in a twentieth of a second
# Folders that cannot be written, each reported once a process.
_warned: set[Path] = set()


def default_cache(prefix: str) -> Path:
    """Return the folder in which Megatron keeps index maps by default, next to the corpus."""
    return Path(prefix).parent / "cache" / "GPTDataset_indices"


def cached_arrays(
    directory: Path,
    title: str,
    key: Mapping[str, object],
    names: Sequence[str],
    build: Callable[[], Mapping[str, np.ndarray]],
) -> dict[str, np.ndarray]:
    """Return the arrays `names` of an entry, from the cache, or made by `build()` and stored.

    key: all that the values depend on (plain JSON values).  If the directory cannot be written, each process
    builds the arrays in memory, with a warning.
    """
    entry = CacheEntry(directory, title, key, names)
    arrays = None
    # An entry that is there needs no lock.
    with contextlib.suppress(DamagedEntry):  # reported below, where it is built again
        if (found := entry.load(verify_large=False)) is not None:
            return found
    # One process builds it; others wait, and load what it stored.
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with locked(directory, title) as is_alone:
            if (found := _load(entry)) is not None:
                return found
            logger.info("building the indices of %s in %s", title, directory)
            start = time.monotonic()
            arrays = dict(build())
            built = time.monotonic()
            entry.store(arrays, is_alone)
    except OSError as e:
        return _in_memory(entry, arrays, e, build)
    logger.info(
        "built the indices of %s: %.1f s, and %.1f s to write %.1f MiB",
        title,
        built - start,
        time.monotonic() - built,
        _mib(arrays),
    )
    return _load(entry) or arrays


def _load(entry: CacheEntry) -> dict[str, np.ndarray] | None:
    """Return the arrays; None if there are none or, with a warning, if the entry is damaged."""
    try:
        return entry.load(verify_large=True)
    except DamagedEntry as e:
        logger.warning(
            "the cached indices %s/%s-* cannot be used (%s): building them again",
            entry.directory,
            entry.stem,
            e,
        )
        return None


def _in_memory(
    entry: CacheEntry,
    arrays: dict[str, np.ndarray] | None,
    error: OSError,
    build: Callable,
) -> dict[str, np.ndarray]:
    """Return arrays that the cache cannot store, as on a full disk, and warn. Partial files have temporary names."""
    why = error.strerror or str(error)
    if arrays is not None:
        why += f"; they take {_mib(arrays):.1f} MiB"
        with contextlib.suppress(OSError):
            why += f", and {shutil.disk_usage(entry.directory).free / 2**20:.1f} MiB are free"
    elif (
        found := _load(entry)
    ) is not None:  # no lock: the folder may be readable, and the entry complete
        return found
    if entry.directory not in _warned:
        _warned.add(entry.directory)
        logger.warning(
            "cannot store indices in %s (%s): each process builds them in memory. Free some "
            "space, or name a writable folder with --data-cache-path.",
            entry.directory,
            why,
        )
    return dict(build()) if arrays is None else arrays


def _mib(arrays: Mapping[str, np.ndarray]) -> float:
    return sum(array.nbytes for array in arrays.values()) / 2**20


@contextlib.contextmanager
def locked(directory: Path, title: str) -> Iterator[bool]:
    """Hold the directory's lock; yields whether it is held.

    On a file system without locks, two processes may build the same entry, which is harmless.
    """
    with open(directory / ".lock", "a") as file:  # closing the file releases the lock
        is_held = True
        try:
            import fcntl

            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                logger.info(
                    "waiting for another process to build the indices of %s in %s",
                    title,
                    directory,
                )
                fcntl.flock(file, fcntl.LOCK_EX)
        except (ImportError, OSError) as e:
            logger.warning(
                "no file lock in %s (%s): several processes may build the same indices",
                directory,
                e,
            )
            is_held = False
        yield is_held


class DamagedEntry(Exception):
    """The files of an entry are not those that were written. The message names the difference."""


class CacheEntry:
    """The arrays `names` that depend on `key`, in a directory.  stem: begins the names of its files."""

    def __init__(
        self,
        directory: Path,
        title: str,
        key: Mapping[str, object],
        names: Sequence[str],
    ):
        self._description = json.dumps(key, indent=4, sort_keys=True)
        self.stem = f"{hashlib.md5(self._description.encode(), usedforsecurity=False).hexdigest()}-{title}"
        self.directory = directory
        self._names = names
        self._done = directory / f"{self.stem}-description.txt"
        self._stamp = directory / f".{self.stem}-verified"

    def load(self, verify_large: bool) -> dict[str, np.ndarray] | None:
        """Return the arrays, mapped. None if there is no entry, or if it is large, not verified yet, and
        `verify_large` is False.

        verify_large: read a large entry in full unless it was verified since it was written. The caller holds
        the lock. Raises DamagedEntry.
        """
        try:
            sums = self._read_sums()
            if sums is None or not self._is_verified(sums, verify_large):
                return None
            # `np.asarray` drops the memmap class, whose indexing takes microseconds; the pages stay mapped.
            return {
                name: np.asarray(np.load(self._path(name), mmap_mode="r"))
                for name in self._names
            }
        except (FileNotFoundError, NotADirectoryError):
            return None
        except DamagedEntry:
            raise
        except Exception as e:  # np.load raises any exception for a damaged header
            raise DamagedEntry(str(e) or type(e).__name__) from None

    def store(self, arrays: Mapping[str, np.ndarray], is_alone: bool) -> None:
        """Write the entry, its description last. is_alone: the lock is held, so leftovers can be removed."""
        if is_alone:
            for left_behind in self.directory.glob(f".{self.stem}-*"):
                left_behind.unlink(missing_ok=True)
        self._done.unlink(missing_ok=True)
        sums = {
            name: _write(self._path(name), lambda f, value=value: np.save(f, value))
            for name, value in arrays.items()
        }
        if _is_large(sums):
            self._write_stamp(sums)
        text = f"{self._description}\n{json.dumps({'checksums': sums})}\n"
        _write(self._done, lambda f: f.write(text.encode()))

    def _path(self, name: str) -> Path:
        return self.directory / f"{self.stem}-{name}.npy"

    def _read_sums(self) -> dict[str, Sums]:
        text = read_regular(self._done, DataError).decode()
        if text == self._description:  # written by an earlier version
            raise DamagedEntry("they were written without checksums")
        if not text.startswith(self._description + "\n"):
            raise DamagedEntry(f"{self._done.name} describes other arrays")
        sums = json.loads(text.removeprefix(self._description))["checksums"]
        return {name: sums[name] for name in self._names}

    def _is_verified(self, sums: Mapping[str, Sums], verify_large: bool) -> bool:
        is_large = _is_large(sums)
        if is_large:
            with contextlib.suppress(OSError, ValueError, DataError):
                if json.loads(read_regular(self._stamp, DataError)) == self._states(
                    sums
                ):
                    return True
            if not verify_large:
                return False
        for name, recorded in sums.items():
            _check(self._path(name), recorded)
        if is_large:
            # In a read-only folder each process verifies.
            with contextlib.suppress(OSError):
                self._write_stamp(sums)
        return True

    def _write_stamp(self, sums: Mapping[str, Sums]) -> None:
        _write(self._stamp, lambda f: f.write(json.dumps(self._states(sums)).encode()))

    def _states(self, sums: Mapping[str, Sums]) -> dict[str, list]:
        """For each array, the properties of its file that change when it is written, replaced or copied."""
        found = {name: self._path(name).stat() for name in self._names}
        return {
            name: [
                s.st_size,
                s.st_mtime_ns,
                s.st_ctime_ns,
                s.st_ino,
                *sums[name].values(),
            ]
            for name, s in found.items()
        }


def sums_of(path: Path) -> Sums:
    """Return the sums of a file; threads read a large one."""
    size = path.stat().st_size
    if size <= BLOCK_BYTES:
        return {"bytes": size, "crc32": [_crc32(path, 0)]}
    with ThreadPoolExecutor(THREADS) as pool:
        blocks = pool.map(
            lambda start: _crc32(path, start), range(0, size, BLOCK_BYTES)
        )
        return {"bytes": size, "crc32": list(blocks)}


def _check(path: Path, recorded: Sums) -> None:
    found = sums_of(path)
    if found["bytes"] != recorded["bytes"]:
        raise DamagedEntry(
            f"{path.name} has {found['bytes']} bytes, and {recorded['bytes']} were written"
        )
    if found != recorded:
        block = len(os.path.commonprefix([found["crc32"], recorded["crc32"]]))
        raise DamagedEntry(
            f"the bytes of {path.name} from {block * BLOCK_BYTES} on are not those that were "
            "written"
        )


def _crc32(path: Path, start: int) -> str:
    crc = 0
    left = BLOCK_BYTES
    with open_regular(path, DataError) as f:  # a pipe would block
        f.seek(start)
        while left and (chunk := f.read(min(left, CHUNK_BYTES))):
            crc = zlib.crc32(chunk, crc)
            left = left - len(chunk)
    return f"{crc:08x}"


def _is_large(sums: Mapping[str, Sums]) -> bool:
    return sum(each["bytes"] for each in sums.values()) > ALWAYS_BYTES


def _write(path: Path, write: Callable) -> Sums:
    """Write to a temporary name, then rename, so that no partial file has the final name."""
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with open(beside, "wb") as f:
            write(f)
            f.flush()
            os.fsync(f.fileno())
        sums = sums_of(beside)
        beside.replace(path)
        return sums
    finally:
        beside.unlink(missing_ok=True)
