"""Checkpoints in an object store: `--save s3://bucket/run`, `gs://bucket/run`, and others that fsspec reaches.

    latest_checkpointed_iteration.txt       the tracker, as in a folder
    iter_0000200.commit                     "iter_0000200.5f0c2a91": where the files of the checkpoint are
    iter_0000200.5f0c2a91/                  its files, as in a folder
    iter_0000300.77e01b4c/                  without a commit: being written, or left by a crash; never read

A store cannot rename, but it replaces one object at once. The files of a save have a name of their own, and the
commit, written last, makes them the checkpoint of the step: it is complete or invisible, also where a step is saved a
second time. A deletion removes the commit first.

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
from pathlib import Path
from typing import Any

import torch
from upath import UPath

from ..errors import CheckpointError
from ..host.direct_file import BLOCK, BlockFile, read_range
from . import folder as folders
from .chunk_archive import Checksummed
from .chunk_file import new_file
from .disk_space import free_bytes
from .folder import TRACKER, name_of

COMMIT = ".commit"
AT_ONCE = 8  # blocks that are read at the same time
_COMMITTED = re.compile(rf"iter_(\d{{7,}}){re.escape(COMMIT)}")
_FILES = re.compile(r"iter_\d{7,}\.[0-9a-f]{8}")


def open_store(text: str) -> UPath:
    """The place of "s3://bucket/run". Keys and endpoints are those of the environment, as of the store's tools."""
    return UPath(text.rstrip("/"), use_listings_cache=False)


@contextlib.contextmanager
def _errors_of(place: UPath) -> Iterator[None]:
    """Raises CheckpointError for an error of the store's library: errors of these have no common base."""
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
@folders.find.register
def _(folder: UPath, step: int) -> UPath | None:
    try:
        name = _commit(folder, step).read_text()
    except FileNotFoundError:
        return None
    if not _FILES.fullmatch(name) or not name.startswith(f"{name_of(step)}."):
        raise CheckpointError(
            f"{_commit(folder, step)} is damaged: it names {name[:80]!r}, where the files of a checkpoint of "
            f"iteration {step} cannot be."
        )
    return folder / name


@folders.steps_in.register
def _(folder: UPath) -> list[int]:
    found = map(_COMMITTED.fullmatch, _names_in(folder))
    return sorted(int(match[1]) for match in found if match)


@folders.begin.register
def _(folder: UPath, step: int) -> UPath:
    names = _names_in(folder)
    committed = {folders.find(folder, step) for step in folders.steps_in(folder)}
    for name in filter(_FILES.fullmatch, names):
        if folder / name not in committed:
            folders.remove(folder / name)
    return folder / f"{name_of(step)}.{secrets.token_hex(4)}"


@folders.publish.register
def _(folder: UPath, step: int, writing: UPath) -> UPath:
    former = folders.find(folder, step)
    _commit(folder, step).write_text(writing.name)
    (folder / TRACKER).write_text(str(step))
    if former is not None:
        folders.remove(former)
    return writing


@folders.delete.register
def _(folder: UPath, step: int) -> None:
    files = folders.find(folder, step)
    _commit(folder, step).unlink()
    folders.remove(files)


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
    """Several blocks are in flight at a time."""
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
        """Send the rest, and make it an object."""
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
    """One of a store."""


@new_file.register
def _(path: UPath) -> ChecksummedStoreFile:
    return ChecksummedStoreFile(path)
