"""The checkpoints that the engines of this process have found, loaded or written, for each directory.

A program that was suspended may continue after another one has saved into its directory. An engine holds the
directory's lock only while it saves, so it compares what `latest` names with what it knows before each save.
"""

import os
from pathlib import Path
from typing import NamedTuple
from weakref import WeakKeyDictionary

from ...checkpoint.folder import steps_in
from ...checkpoint.known_saves import identifier_of, written_here
from ...errors import CheckpointError


class Named(NamedTuple):
    """The newest checkpoint of the folder that `latest` names. step: None while there is none.

    identifier: see `identifier_of`
    """

    folder: str
    step: int | None
    identifier: str | None


# Of all engines of a process: (pid, directory) → checkpoints. One engine may save beside another.
_known: dict[tuple[int, Path], set[Named]] = {}
# Engine → directories that it has used.
_used: WeakKeyDictionary[object, set[Path]] = WeakKeyDictionary()


def look(engine: object, directory: Path, folder: Path) -> None:
    """Take the checkpoint in `folder`, which `latest` in `directory` names, as known."""
    _remember(engine, directory, _named(folder))


def wrote(engine: object, directory: Path, folder: Path, step: int) -> None:
    """Take the checkpoint that the engine has just written into `folder` as known, without reading it."""
    identifier = written_here(folder, step)
    _remember(engine, directory, Named(folder.name, step, identifier))


def check(engine: object, directory: Path, folder: Path) -> None:
    """Raises CheckpointError if `latest` names a checkpoint that is not known.

    folder: as of `look`. The first call of an engine for a directory looks. An earlier step than the last
    one that is known is accepted: the user has deleted later ones, or changed `latest`.
    """
    if directory.resolve() not in _used.get(engine, ()):
        look(engine, directory, folder)
    named = _named(folder)
    known = _known[os.getpid(), directory.resolve()]
    last = max((one.step for one in known if one.step is not None), default=0)
    if named.step is not None and named.step >= last and named not in known:
        raise CheckpointError(
            f"{folder} was saved by another program while this one was suspended or cut off from the file "
            "system: this program has neither written nor loaded it. Saving now would mix two runs. Load it "
            "with engine.load_checkpoint to continue from there, or save to another directory."
        )


def _remember(engine: object, directory: Path, named: Named) -> None:
    _used.setdefault(engine, set()).add(directory.resolve())
    _known.setdefault((os.getpid(), directory.resolve()), set()).add(named)


def _named(folder: Path) -> Named:
    steps = steps_in(folder)
    return (
        Named(folder.name, steps[-1], identifier_of(folder, steps[-1]))
        if steps
        else Named("", None, "")
    )
