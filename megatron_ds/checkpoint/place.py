"""`place_of`: where checkpoints are, a folder or a place in an object store.

Functions of `folder.py` and of the files below it take either. A feature has their implementations for stores; it is
imported, with the libraries of the store, at the first place in one.
"""

import os
from collections.abc import Callable
from pathlib import Path

from ..errors import CheckpointError
from ..features import Provided

NAMELESS = ("s3:///", "gs:///")
# (place in a store) -> Path. Registers the functions of folders for it.
OPEN_STORE: Provided[Callable[[str], Path]] = Provided("object stores")


def is_store(directory: str | os.PathLike) -> bool:
    """Return whether the text names a place in a store: "s3://bucket/run"."""
    return "://" in str(directory)


def absolute(directory: str | os.PathLike) -> str:
    """Return a name of the folder that does not depend on the working directory."""
    return str(directory) if is_store(directory) else os.path.abspath(directory)


def place_of(directory: str | os.PathLike) -> Path:
    """Return the folder as a Path, or the place in a store as a `upath.UPath`, which has the same methods.

    Raises CheckpointError for a store without a bucket, and when its libraries are not installed.
    """
    if not is_store(directory):
        return Path(directory)
    text = str(directory)
    if text.startswith(NAMELESS) or text.endswith("://"):
        raise CheckpointError(
            f"{text} names no bucket. Write a place as s3://bucket/run."
        )
    try:
        return OPEN_STORE.get()(text)
    except (ImportError, ValueError) as error:
        raise CheckpointError(
            f"{text}: this store cannot be opened ({error}). pip install 'megatron_ds[stores]' has what "
            "s3:// and gs:// need; other stores need their fsspec package."
        ) from error
