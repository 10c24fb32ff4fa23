"""The folder of checkpoints: names, completeness, publication and retention. No tensors, no collectives.

    latest_checkpointed_iteration.txt     the tracker: "200"; replaced by a rename, may be edited to go back
    iter_0000100/  iter_0000200/          complete checkpoints
    .iter_0000300.writing-5f0c2a91/       being written, or left by a crash: never read, then removed
    .latest_….txt.5f0c2a91                the next tracker, of the same save
    .iter_0000200.replaced/               the former iter_0000200, while the step is saved a second time
    .iter_0000050.deleting/               being deleted

A save writes and syncs `.writing`, renames it to its final name, then replaces the tracker. Renames are
atomic, so at any moment the tracker names a complete checkpoint. Saving a step a second time needs two
renames; between them only `.replaced` has the state, so `find` looks there too. One job at a time saves into
a folder (`lock.py`); the name of `.writing` still has a random part, so that files of two jobs cannot mix.

Note: why the next tracker is written before the checkpoint is renamed. A job may be suspended between any two
operations, and continue when another one has taken over. That one first renames `.writing` and removes the next tracker
(`clear`), so that both renames of the first job fail. They happen before the lock has changed hands, or never.
"""

import contextlib
import errno
import logging
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from functools import singledispatch
from pathlib import Path

from ..errors import CheckpointError
from ..host import regular_file

logger = logging.getLogger(__name__)

TRACKER = "latest_checkpointed_iteration.txt"
RUN_FILE = "run.json"
INDEX_FILE = ".metadata"
# Bytes of the path of a save folder: systems allow 4,095, and names in it need up to 160.
LONGEST_PATH = 4095 - 160
_NAME = re.compile(r"iter_(\d{7,})")
_HIDDEN = re.compile(r"\.(iter_\d{7,})\.(writing|replaced|deleting)(?:-[0-9a-f]+)?")


def name_of(step: int) -> str:
    """Name of the directory of a checkpoint: "iter_0000200"."""
    return f"iter_{step:07d}"


@singledispatch
def find(folder: Path, step: int) -> Path | None:
    """Path of the checkpoint of `step`, complete or not; None when there is none."""
    choices = (folder / name_of(step), _replaced_path(folder, step))
    return next((path for path in choices if path.is_dir()), None)


@singledispatch
def steps_in(folder: Path) -> list[int]:
    """Steps that have a directory, complete or not, ascending."""
    found = set()
    for path in folder.iterdir() if folder.is_dir() else ():
        hidden = _HIDDEN.fullmatch(path.name)
        name = hidden[1] if hidden and hidden[2] == "replaced" else path.name
        if (match := _NAME.fullmatch(name)) and path.is_dir():
            found.add(int(match[1]))
    return sorted(found)


def is_ours(path: Path) -> bool:
    """Return whether this package wrote the checkpoint, and not another program with the same directory names."""
    return (path / RUN_FILE).is_file() and (path / INDEX_FILE).is_file()


def read_tracker(folder: Path) -> str | None:
    """Return the tracker's text; None when there is no tracker, or no folder. Raises CheckpointError for a
    special file.
    """
    try:
        return read_regular(folder / TRACKER).decode(errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None


@singledispatch
def clear(folder: Path) -> None:
    """Remove the files of saves that did not end. If their processes continue, they cannot publish them.

    The caller holds the folder's lock.
    """
    for path in list(folder.iterdir()):
        hidden = _HIDDEN.fullmatch(path.name)
        if hidden and hidden[2] == "writing":
            _remove_at_once(path, path.with_name(f".{hidden[1]}.deleting-{_mark()}"))
        elif hidden and hidden[2] == "deleting":
            _remove(path)
        elif path.name.startswith(f".{TRACKER}."):
            path.unlink(missing_ok=True)
    _restore_replaced(folder)


@singledispatch
def begin(folder: Path, step: int) -> Path:
    """Remove leftovers of crashed saves; return a new directory for the checkpoint of `step`.

    The caller holds the folder's lock.
    """
    folder.mkdir(parents=True, exist_ok=True)
    clear(folder)
    writing = folder / f".{name_of(step)}.writing-{_mark()}"
    writing.mkdir()
    _write_new(_next_tracker(writing), str(step))
    return writing


@singledispatch
def publish(folder: Path, step: int, writing: Path) -> Path:
    """Make `writing`, whose files are synced, the checkpoint of `step`, to which the tracker points."""
    target = folder / name_of(step)
    replaced = _replaced_path(folder, step)
    sync_directory(writing)
    if os.path.lexists(target):
        os.stat(writing)  # an error if another job has taken over and removed it
        _move_aside(target, replaced)
    try:
        os.rename(writing, target)
    except FileNotFoundError:
        # Another job has taken over meanwhile: the directory that was moved aside is its checkpoint.
        with contextlib.suppress(OSError):
            os.rename(replaced, target)
        raise
    sync_directory(folder)
    os.replace(_next_tracker(writing), folder / TRACKER)
    sync_directory(folder)
    _remove(replaced)
    return target


@singledispatch
def abandon(writing: Path) -> None:
    """Remove the directory of a save that is not published."""
    _next_tracker(writing).unlink(missing_ok=True)
    remove(writing)


@singledispatch
def delete(folder: Path, step: int) -> None:
    """Remove a checkpoint. A rename hides it first, so that a partly deleted checkpoint is never visible."""
    deleting = folder / f".{name_of(step)}.deleting"
    _remove(deleting)
    _remove_at_once(folder / name_of(step), deleting)


def check_writable(folder: Path) -> None:
    """Create the folder and write a probe file. Raises CheckpointError at start-up, not at the first save."""
    try:
        make(folder)
        probe(folder, 1)
    except OSError as error:
        raise CheckpointError(
            f"--save {folder}: no checkpoint can be written there ({error.strerror or error}), and the run "
            "would lose its work at the first save. Give a folder that this user may write to, or omit "
            "--save."
        ) from error


@singledispatch
def check_reachable(folder: Path) -> None:
    """Raises CheckpointError for a store that does not answer. A folder may be absent."""


@singledispatch
def probe(folder: Path, count: int) -> None:
    """Write and sync a temporary file of `count` bytes. Raises OSError when that fails."""
    with (
        tempfile.NamedTemporaryFile(dir=folder, prefix=".probe-") as file,
        naming(folder),
    ):
        file.write(bytes(count))
        file.flush()
        os.fsync(file.fileno())


@singledispatch
def write_durably(path: Path, text: str) -> None:
    """Write a temporary file, sync it and rename it to `path`: readers see the old text or the new one.

    The temporary file has a random name and is created exclusively, so a planted link is not followed.
    """
    beside = path.with_name(f".{path.name}.{_mark()}")
    _write_new(beside, text, path)
    try:
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the path to an OSError of a write, which the system reports without one."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


@singledispatch
def read_regular(path: Path) -> bytes:
    """Return the bytes of a file. Raises CheckpointError for a pipe or device, which could block."""
    return regular_file.read_regular(path, CheckpointError)


@singledispatch
def sync_directory(path: Path) -> None:
    """Sync a directory: created names and renames then survive a power loss."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some network file systems cannot sync one.
        if error.errno not in (
            errno.EINVAL,
            errno.ENOTSUP,
        ):
            raise
    finally:
        os.close(handle)


@singledispatch
def make(folder: Path) -> None:
    """Create the folder unless it is there. Raises OSError, also for a path that leaves no room for names."""
    folder.mkdir(parents=True, exist_ok=True)
    if len(os.fsencode(folder.resolve())) > LONGEST_PATH:
        raise OSError(
            errno.ENAMETOOLONG,
            f"the path is longer than {LONGEST_PATH:,} bytes, which leaves "
            "no room for the names of a checkpoint's files",
        )


@singledispatch
def remove(path: Path) -> None:
    """Remove a directory with its files, if it is there."""
    shutil.rmtree(path, ignore_errors=True)


@singledispatch
@contextlib.contextmanager
def in_file_system(path: Path) -> Iterator[Path]:
    """Yield a directory of the file system; its files are written to `path` when the block ends."""
    yield path


@singledispatch
def local_copy(path: Path) -> Path:
    """Return a directory of this machine with the files of `path`: itself, or a copy that is removed when
    Python ends.
    """
    return path


@singledispatch
def write_directory(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Write a temporary folder, sync it and rename it: `folder` is complete or absent, never partial."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}")
    try:
        beside.mkdir()
        for name, data in contents.items():
            (beside / name).parent.mkdir(exist_ok=True)
            with naming(folder / name), open(beside / name, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        for place in (*{(beside / name).parent for name in contents}, beside):
            sync_directory(place)
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(beside, folder)
        sync_directory(folder.parent)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _mark() -> str:
    return secrets.token_hex(4)


def _next_tracker(writing: Path) -> Path:
    """Return the file that replaces the tracker when `writing` is published."""
    mark = writing.name.rpartition("-")[2]
    return writing.with_name(f".{TRACKER}.{mark}")


def _write_new(path: Path, text: str, named: Path | None = None) -> None:
    """Create a file with the text, and sync it. If that fails, remove it. named: the path that an error names"""
    handle = regular_file.create_new(path)
    try:
        with naming(named or path), open(handle, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _replaced_path(folder: Path, step: int) -> Path:
    return folder / f".{name_of(step)}.replaced"


def _restore_replaced(folder: Path) -> None:
    """Finish or undo a second save of a step that crashed between its two renames."""
    for step in steps_in(folder):
        replaced = _replaced_path(folder, step)
        target = folder / name_of(step)
        if os.path.lexists(target):
            _remove(replaced)
        elif os.path.lexists(replaced):
            os.rename(replaced, target)


def _remove_at_once(path: Path, hidden: Path) -> None:
    """Hide a directory by a rename, then remove it: a partly deleted one is never visible."""
    os.rename(path, hidden)
    _remove(hidden)


def _remove(path: Path) -> None:
    """Remove a directory with its files, or a file. Of a link, which users make, remove only the link."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def _move_aside(target: Path, replaced: Path) -> None:
    if is_ours(target):
        os.rename(target, replaced)
        return
    kept = target.with_name(f"{target.name}.not_ours.{secrets.token_hex(4)}")
    os.rename(target, kept)
    logger.warning(
        "%s was not written by this program, or is damaged: kept as %s",
        target,
        kept.name,
    )


def to_delete(
    steps: Iterable[int], saved: int, limit: int | None, retain: int | None = None
) -> list[int]:
    """Return the steps to delete after `saved` was written, so that `limit` of the complete checkpoints stay.
    retain: of those before `saved`, keep only the multiples of this.

    Steps later than `saved` belong to training that the user discarded by editing the tracker. They are
    neither counted nor deleted: counting them as the newest would delete the checkpoints of the current run.
    """
    assert limit is None or limit >= 1, (
        f"keeping {limit} checkpoints would delete the one just written"
    )
    own = sorted(step for step in set(steps) if step <= saved)
    beyond = own[:-limit] if limit is not None else []
    return sorted(
        {*beyond, *(step for step in own if retain and step < saved and step % retain)}
    )


def prune(
    folder: Path, saved: int, limit: int | None, retain: int | None = None
) -> None:
    """Delete the checkpoints in `to_delete`, except directories that another program wrote.

    The new checkpoint is already durable, so a failed deletion is a warning and training continues.
    """
    try:
        ours = [
            step
            for step in steps_in(folder)
            if (path := find(folder, step)) and is_ours(path)
        ]
    except OSError as error:
        logger.warning("could not list the checkpoints of %s: %s", folder, error)
        return
    for step in to_delete(ours, saved, limit, retain):
        try:
            delete(folder, step)
        except OSError as error:
            logger.warning(
                "could not delete the old checkpoint %s: %s",
                folder / name_of(step),
                error,
            )
