"""The folder of checkpoints: names, what is complete, how a new one becomes visible. No tensors, no collectives.

    latest_checkpointed_iteration.txt     the tracker: "200"; replaced by a rename, may be edited to go back
    iter_0000100/  iter_0000200/          complete checkpoints
    .iter_0000300.writing-5f0c2a91/       being written, or left by a crash: never looked at, removed by the next save
    .iter_0000200.replaced/               what iter_0000200 was before it was saved a second time
    .iter_0000050.deleting/               on its way out

A save writes and syncs `.writing`, renames it to its name, then replaces the tracker. Renames are atomic, so at any moment
the tracker leads to a complete checkpoint. Saving a step a second time needs two renames; between them only `.replaced`
has the state, which is why `find` looks there too. One job at a time saves into a folder (`lock.py`); the name of `.writing`
has a random part all the same, so that the files of two jobs never meet.
"""

import errno
import logging
import os
import re
import secrets
import shutil
import stat
import tempfile
from pathlib import Path

from ..errors import CheckpointError

logger = logging.getLogger(__name__)

TRACKER = "latest_checkpointed_iteration.txt"
RUN_FILE = "run.json"
INDEX_FILE = ".metadata"
_NAME = re.compile(r"iter_(\d{7,})")
_HIDDEN = re.compile(r"\.(iter_\d{7,})\.(writing|replaced|deleting)(?:-[0-9a-f]+)?")


def name_of(step: int) -> str:
    return f"iter_{step:07d}"


def find(folder: Path, step: int) -> Path | None:
    """Where the checkpoint of `step` lies, complete or not."""
    choices = (folder / name_of(step), _replaced_path(folder, step))
    return next((path for path in choices if path.is_dir()), None)


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
    """Written by this package, as opposed to another program with the same directory names."""
    return (path / RUN_FILE).is_file() and (path / INDEX_FILE).is_file()


def read_tracker(folder: Path) -> str | None:
    """The tracker's text; None when there is no tracker. Raises CheckpointError when it is no regular file."""
    try:
        return read_regular(folder / TRACKER).decode(errors="replace").strip()
    except FileNotFoundError:
        return None


def begin(folder: Path, step: int) -> Path:
    """Clear what crashed saves left; the new directory to write the checkpoint of `step` into.

    The caller holds the folder's lock: whatever else is being written there has no living writer.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _restore_replaced(folder)
    for path in list(folder.iterdir()):
        hidden = _HIDDEN.fullmatch(path.name)
        if hidden and hidden[2] in ("writing", "deleting"):
            _remove(path)
        elif path.name.startswith(f".{TRACKER}."):
            path.unlink(missing_ok=True)
    writing = folder / f".{name_of(step)}.writing-{secrets.token_hex(4)}"
    writing.mkdir()
    return writing


def abandon(writing: Path) -> None:
    """Remove a directory that will not become a checkpoint."""
    shutil.rmtree(writing, ignore_errors=True)


def publish(folder: Path, step: int, writing: Path) -> Path:
    """Make what lies in `writing` the checkpoint of `step`, and let the tracker point to it. All its files are synced."""
    target, replaced = folder / name_of(step), _replaced_path(folder, step)
    sync_directory(writing)
    if os.path.lexists(target):
        _move_aside(target, replaced)
    os.rename(writing, target)
    sync_directory(folder)
    write_durably(folder / TRACKER, str(step))
    _remove(replaced)
    return target


def delete(folder: Path, step: int) -> None:
    """Remove a checkpoint; hidden by a rename first, so that half of one is never seen."""
    deleting = folder / f".{name_of(step)}.deleting"
    _remove(deleting)
    os.rename(folder / name_of(step), deleting)
    _remove(deleting)


def check_writable(directory: str | os.PathLike) -> None:
    """Make the folder and write a file in it, as a save will. Raises CheckpointError now rather than hours from now."""
    folder = Path(directory)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".probe-") as probe:
            probe.write(b"x")
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        raise CheckpointError(
            f"--save {folder}: no checkpoint can be written there ({error.strerror or error}), and the run would lose its "
            "work at the first save. Name a folder that this user may write to, or leave out --save.") from error


def write_durably(path: Path, text: str) -> None:
    """Write beside, sync, rename into place: readers see the old text or the new one.

    The file beside has a random name and is made by this call: a link that was put there is not followed.
    """
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
    try:
        with open(handle, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def read_regular(path: Path) -> bytes:
    """The bytes of a file. Raises OSError as `open` does, and CheckpointError for a pipe or a device, which could block."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise CheckpointError(f"{path} is not a regular file. Remove it, or restore the file that belongs there.")
    with open(handle, "rb") as file:
        return file.read()


def sync_directory(path: Path) -> None:
    """Names of files, and renames, survive a power loss from here on."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):      # some network file systems sync no directories
            raise
    finally:
        os.close(handle)


def _replaced_path(folder: Path, step: int) -> Path:
    return folder / f".{name_of(step)}.replaced"


def _restore_replaced(folder: Path) -> None:
    """Finish or undo a second save of a step that was cut off between its two renames."""
    for step in steps_in(folder):
        replaced, target = _replaced_path(folder, step), folder / name_of(step)
        if os.path.lexists(target):
            _remove(replaced)
        elif os.path.lexists(replaced):
            os.rename(replaced, target)


def _remove(path: Path) -> None:
    """A directory with its files, or a file. Of a link the link only: users move old checkpoints elsewhere and link them."""
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
    logger.warning("%s was not written by this program, or is damaged: kept as %s", target, kept.name)
