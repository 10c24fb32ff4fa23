"""A folder that is written complete or not at all."""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...checkpoint.folder import sync_directory
from ...errors import CheckpointError

WRITER = "inline_container"  # the writer of torch.save, in its errors


def check_vacant_folder(folder: Path) -> None:
    """Raises CheckpointError if the folder exists and is not empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(
            f"--save {folder} exists and is not empty: a conversion does not mix its files "
            "with others. Give a new folder, or delete this one."
        )


@contextmanager
def published(folder: Path) -> Iterator[Path]:
    """A hidden folder beside `folder`, renamed to it when the block ends, removed when it raises.

    Files in it that the block did not sync are synced. Raises CheckpointError if `folder` is not vacant or
    cannot be written.
    """
    check_vacant_folder(folder)
    hidden = folder.absolute().with_name(
        f".{folder.absolute().name}.writing-{secrets.token_hex(4)}"
    )
    try:
        hidden.mkdir(parents=True)
        yield hidden
        for directory, _, files in os.walk(hidden):
            for name in files:
                _sync(Path(directory) / name)
            sync_directory(Path(directory))
        if folder.exists():
            folder.rmdir()
        os.rename(hidden, folder)
        sync_directory(hidden.parent)
    except (OSError, RuntimeError) as error:
        if not (reason := _reason(error)):
            raise
        raise CheckpointError(unwritten(folder, reason)) from error
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


def unwritten(folder: Path, reason: str) -> str:
    """Return the message about a folder that cannot be written."""
    return f"--save {folder} cannot be written: {reason}. Nothing was written. Give another folder, or make room there."


def _reason(error: BaseException) -> str:
    """Return the system's reason for not writing a file; "" for another error. torch.save raises an error of its
    own, with that of the system as its context or without it."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, OSError):
        found = found.__context__
    if found is not None:
        return found.strerror or str(found)
    return f"torch.save failed ({error})" if WRITER in str(error) else ""


def _sync(path: Path) -> None:
    with open(path, "rb+") as file:
        os.fsync(file.fileno())
