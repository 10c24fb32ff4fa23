"""Which folders hold a checkpoint, of this package or another program."""

from collections.abc import Mapping
from typing import Any

from ..checkpoint.load import latest
from ..checkpoint.place import place_of
from .foreign_checkpoints import foreign_checkpoints


def has_checkpoint(folder: str | None, load_format: str | None = None) -> bool:
    """Return whether the folder holds a checkpoint, of this package or another program. Raises CheckpointError for
    one of this package that is not complete."""
    if folder is None:
        return False
    if foreign_checkpoints(folder).format_of_folder(folder, load_format) is not None:
        return True
    return place_of(folder).is_dir() and latest(folder) is not None


def folder_of_model(given: Mapping[str, Any]) -> str | None:
    """Return the folder whose model a run has: --load, or --pretrained-checkpoint where that has no checkpoint.

    given: values of flags by the paths of their options
    """
    load = given.get("checkpoint.load")
    pretrained = given.get("checkpoint.pretrained_checkpoint")
    if pretrained is None or has_checkpoint(load, given.get("checkpoint.load_format")):
        return load
    return pretrained
