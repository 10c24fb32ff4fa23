"""Checkpoints in an object store: `--save s3://bucket/run`, `gs://bucket/run`, and others that fsspec reaches.

    latest_checkpointed_iteration.txt       the tracker, as in a folder
    iter_0000200.commit                     "iter_0000200.5f0c2a91": where the files of the checkpoint are
    iter_0000200.5f0c2a91/                  its files, as in a folder
    iter_0000300.commit                     "", and in a second line "iter_0000300.77e01b4c", which is being written
    iter_0000300.77e01b4c/                  not in a first line: being written, or left by a crash; never read

A store cannot rename, but it replaces one object at once. The files of a save have a name of their own, and the
commit, written last, makes them the checkpoint of the step: it is complete or invisible, also where a step is saved a
second time. A deletion removes the commit first.

Note: why a save is announced in the second line of its commit. A request of a job that was suspended may arrive when
another job has taken over. A job that has acquired the lock erases the second lines that it finds. A commit replaces
the announcement of its own save on the condition that it is there (`store_objects.py`), so it takes effect before the
lock has changed hands, or never. The tracker is replaced on the condition that it has not changed since before the
commit. All other objects have names that no other process writes.

These are the implementations of `folder.py`, `direct_file.read_range` and `chunk_file.new_file` for a
`upath.UPath`. Listings are not cached, since other processes write too.
"""

import atexit
import contextlib
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...checkpoint import folder as folders
from ...checkpoint.chunk_archive import Checksummed
from ...checkpoint.chunk_file import new_file
from ...checkpoint.disk_space import free_bytes
from ...checkpoint.folder import TRACKER, name_of
from ...errors import CheckpointError
from ...host.direct_file import BLOCK, BlockFile, read_range
from . import store_objects as objects
from .store_path import UPath

COMMIT = ".commit"
AT_ONCE = 8  # blocks that are read at the same time
_COMMITTED = re.compile(rf"iter_(\d{{7,}}){re.escape(COMMIT)}")
_FILES = re.compile(r"iter_\d{7,}\.[0-9a-f]{8}")


@contextlib.contextmanager
def _errors_of(place: UPath) -> Iterator[None]:
    """Raise CheckpointError for any error of the store's library: such errors have no common base class."""
    try:
        yield
    except (FileNotFoundError, PermissionError, CheckpointError):
        raise
    except Exception as error:
        raise CheckpointError(
            f"{place} cannot be reached ({type(error).__name__}: {error}). Check the store's name, its address and "
            "the keys in the environment, such as AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY "
            "of S3 or GOOGLE_APPLICATION_CREDENTIALS of Google's store."
        ) from error


# ------------------------------------------------------------------ checkpoints
@dataclass(frozen=True)
class _Commit:
    """The content of a commit: names of files of the checkpoint, and of a save that may commit; "" for none."""

    files: str
    writing: str = ""

    def to_bytes(self) -> bytes:
        lines = (self.files, self.writing) if self.writing else (self.files,)
        return "\n".join(lines).encode()


def _parsed(content: bytes) -> _Commit:
    files, _, writing = content.decode(errors="replace").partition("\n")
    return _Commit(files, writing)


def _files_at(path: UPath, commit: _Commit) -> UPath | None:
    """Return the files that a commit names; None if it only announces some. Raises CheckpointError for other
    names.
    """
    if commit.writing and not commit.files:
        return None
    step = path.name.removesuffix(COMMIT)
    if not _FILES.fullmatch(commit.files) or not commit.files.startswith(f"{step}."):
        raise CheckpointError(
            f"{path} is damaged: it names {commit.files[:80]!r}, where the files of {step} cannot be."
        )
    return path.parent / commit.files


def _commits_in(folder: UPath, names: list[str] | None = None) -> dict[int, _Commit]:
    """Return the mapping step → its commit, even if that only announces a save. names: as of `_names_in`"""
    names = _names_in(folder) if names is None else names
    found = {
        int(match[1]): folder / match[0]
        for match in map(_COMMITTED.fullmatch, names)
        if match
    }
    with _errors_of(folder):
        contents = folder.fs.cat_ranges(
            [path.path for path in found.values()], None, None, on_error="return"
        )
    commits = {}
    for step, content in zip(found, contents, strict=True):
        if isinstance(content, FileNotFoundError):
            continue  # deleted in the meantime
        with _errors_of(folder):
            if isinstance(content, Exception):
                raise content
        commits[step] = _parsed(content)
    return commits


@folders.find.register
def _(folder: UPath, step: int) -> UPath | None:
    path = _commit(folder, step)
    try:
        with _errors_of(folder):
            content = path.read_bytes()
    except FileNotFoundError:
        return None
    return _files_at(path, _parsed(content))


@folders.steps_in.register
def _(folder: UPath) -> list[int]:
    commits = _commits_in(folder)
    return sorted(
        step for step, commit in commits.items() if commit.files or not commit.writing
    )


@folders.clear.register
def _(folder: UPath) -> None:
    # Once the second lines are erased, no save of an earlier holder of the lock can commit. Of the names listed before,
    # those that no first line has are then of no use.
    names = _names_in(folder)
    for step, commit in _commits_in(folder, names).items():
        if commit.writing:
            _withdraw(_commit(folder, step))
    committed = {commit.files for commit in _commits_in(folder).values()}
    for name in filter(_FILES.fullmatch, names):
        if name not in committed:
            folders.remove(folder / name)


def _withdraw(path: UPath) -> None:
    """Erase the announcement of a save; remove a commit that has nothing else."""
    while (found := objects.read(path)) and (commit := _parsed(found.content)).writing:
        if commit.files:
            is_done = objects.write(path, _Commit(commit.files).to_bytes(), found)
        else:
            is_done = objects.remove(path, found)
        if is_done:
            return


@folders.begin.register
def _(folder: UPath, step: int) -> UPath:
    folders.clear(folder)
    writing = f"{name_of(step)}.{secrets.token_hex(4)}"
    path = _commit(folder, step)
    found = objects.read(path)
    files = _parsed(found.content).files if found else ""
    announced = _Commit(files, writing).to_bytes()
    if not objects.write(path, announced, found):
        raise _changed_by_another(path)
    return folder / writing


@folders.publish.register
def _(folder: UPath, step: int, writing: UPath) -> UPath:
    # The tracker is read before the commit: the lock may change hands after that.
    tracker = objects.read(folder / TRACKER)
    path = _commit(folder, step)
    found = objects.read(path)
    announced = found and _parsed(found.content)
    if not announced or announced.writing != writing.name:
        raise _changed_by_another(path)
    if not objects.write(path, _Commit(writing.name).to_bytes(), found):
        raise _changed_by_another(path)
    if not objects.write(folder / TRACKER, str(step).encode(), tracker):
        raise _changed_by_another(folder / TRACKER)
    if former := _files_at(path, announced):
        folders.remove(former)
    return writing


@folders.abandon.register
def _(writing: UPath) -> None:
    path = writing.parent / f"{writing.name.partition('.')[0]}{COMMIT}"
    # After an error of the store this may fail, too. The next save removes what stays.
    with contextlib.suppress(Exception):
        found = objects.read(path)
        if found and _parsed(found.content).writing == writing.name:
            _withdraw(path)
            found = objects.read(path)
        # The commit may have been written in spite of the error.
        if not found or _parsed(found.content).files != writing.name:
            folders.remove(writing)


@folders.delete.register
def _(folder: UPath, step: int) -> None:
    path = _commit(folder, step)
    found = objects.read(path)
    if found is None:
        return
    files = _files_at(path, _parsed(found.content))
    if files and objects.remove(path, found):
        folders.remove(files)


def _changed_by_another(path: UPath) -> CheckpointError:
    return CheckpointError(
        f"{path} was changed by another process while this one saved. Check which jobs save to {path.parent}."
    )


def _commit(folder: UPath, step: int) -> UPath:
    return folder / f"{name_of(step)}{COMMIT}"


def _names_in(folder: UPath) -> list[str]:
    try:
        return [path.name for path in folder.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []


# ------------------------------------------------------------------ files
@folders.remove.register
def _(path: UPath) -> None:
    with contextlib.suppress(FileNotFoundError):
        path.fs.rm(path.path, recursive=True)


@folders.read_regular.register
def _(path: UPath) -> bytes:
    with _errors_of(path):
        return path.read_bytes()


@folders.write_durably.register
def _(path: UPath, text: str) -> None:
    path.write_text(text)


@folders.sync_directory.register
def _(path: UPath) -> None:
    """An object is durable when its write returns."""


@folders.check_reachable.register
def _(folder: UPath) -> None:
    with _errors_of(folder):
        folder.exists()


@folders.probe.register
def _(folder: UPath, count: int) -> None:
    path = folder / f".probe-{secrets.token_hex(4)}"
    with _errors_of(folder):
        path.write_bytes(bytes(count))
        path.unlink()


@folders.make.register
def _(folder: UPath) -> None:
    """A store has no directories."""


@free_bytes.register
def _(folder: UPath) -> None:
    """A store does not fill up."""


@folders.in_file_system.register
@contextlib.contextmanager
def _(path: UPath) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)
        for file in Path(name).iterdir():
            (path / file.name).write_bytes(file.read_bytes())


@folders.local_copy.register
def _(path: UPath) -> Path:
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path.fs.get(path.path, f"{folder}/", recursive=True)
    return Path(folder, path.name)


@folders.write_directory.register
def _(folder: UPath, contents: Mapping[str, bytes]) -> None:
    for name, data in contents.items():
        (folder / name).write_bytes(data)


@read_range.register
def _(path: UPath, offset: int, length: int) -> torch.Tensor:
    """Read a part of an object, several blocks at a time."""
    length = max(0, min(length, path.stat().st_size - offset))
    found = torch.empty(length, dtype=torch.uint8)
    for begin in range(0, length, AT_ONCE * BLOCK):
        starts = range(begin, min(begin + AT_ONCE * BLOCK, length), BLOCK)
        ends = [min(start + BLOCK, length) for start in starts]
        contents = path.fs.cat_ranges(
            [path.path] * len(starts),
            [offset + start for start in starts],
            [offset + end for end in ends],
            on_error="raise",
        )
        for start, end, content in zip(starts, ends, contents, strict=True):
            found.numpy()[start:end] = memoryview(content)
    return found


class StoreFile(BlockFile):
    """An object that is written part by part. It exists when `sync` has returned, and not before."""

    def __init__(self, path: UPath):
        super().__init__()
        self._object: Any = path.fs.open(path.path, "wb", block_size=BLOCK)
        self._is_complete = False

    def sync(self) -> None:
        """Send the rest; the object exists then."""
        self._object.write(memoryview(self._blocks[0])[: self._filled])
        self._object.close()
        self._is_complete = True

    def close(self) -> None:
        """Drop the parts of an object that is not complete."""
        if not self.closed and not self._is_complete:
            self._object.closed = True
            self._object.discard()
        super().close()

    def _send(self) -> None:
        self._object.write(self._blocks[0])
        self._start += BLOCK
        self._filled = 0


class ChecksummedStoreFile(Checksummed, StoreFile):
    """A checksummed file of a store."""


@new_file.register
def _(path: UPath) -> ChecksummedStoreFile:
    return ChecksummedStoreFile(path)
