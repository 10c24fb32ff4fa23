"""Where a rank is, in a mapped file that is still there after SIGKILL: its step, instruction and collective.

The launcher's agent gives each rank a file (PLACES_FILE), which place_file.py writes. Without the variable nothing
is written.
"""

import contextlib
import faulthandler
import logging
import os
import platform
import signal
import sys
import time
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING

from .place_words import FOR_DEVICE, FOR_RANKS, NOT_WAITING, TRAINING

if TYPE_CHECKING:
    from .place_file import PlaceWriter

logger = logging.getLogger(__name__)
PLACES_FILE = "MEGATRON_DS_PLACES"
STACKS = signal.SIGQUIT
"""The signal at which a rank with a file of places prints the stacks of its threads."""


EVALUATING = "evaluating"
STARTING = "starting"
READING = "reading data"
SAVING = "saving"
ENDING = "ending"
COMPILING = "compiling"
EXPORTING = "exporting a trace"
QUICK = (TRAINING, EVALUATING)


_writer: "list[PlaceWriter]" = []


def open_places(environ: MutableMapping[str, str], rank: int) -> None:
    """Begin to write the places of this process, if the launcher gave it a file, and print stacks at the signal
    STACKS.

    A file is for one process: its children get none.
    """
    path = environ.pop(PLACES_FILE, "")
    if not path or _writer:
        return
    from .place_file import PlaceWriter

    values = {"rank": rank, "host": platform.node(), "pid": os.getpid()}
    try:
        _writer.append(PlaceWriter(Path(path), values))
    except OSError as error:
        logger.warning(
            "%s cannot be written, so this rank is not watched: %s", path, error
        )
        return
    if sys.__stderr__ is not None:
        with contextlib.suppress(ValueError, RuntimeError, OSError):
            faulthandler.register(STACKS, file=sys.__stderr__, all_threads=True)


def writer() -> "PlaceWriter | None":
    """Return the writer of the places of this process; None where they are not watched."""
    return _writer[0] if _writer else None


class _Waiting:
    """A context in which this rank waits for other ranks. Only the thread that trains enters it.

    what: FOR_RANKS; FOR_DEVICE by way of its device, whose work includes collectives
    """

    __slots__ = ("nanoseconds", "_since", "_what")

    def __init__(self, what: int):
        self.nanoseconds = 0
        self._since = 0
        self._what = what

    def __enter__(self) -> None:
        if _writer:
            _writer[0].wait(self._what)
        self._since = time.perf_counter_ns()

    def __exit__(self, *_: object) -> None:
        self.nanoseconds += time.perf_counter_ns() - self._since
        if _writer:
            _writer[0].wait(NOT_WAITING)


WAITING = _Waiting(FOR_RANKS)
WAITING_FOR_DEVICE = _Waiting(FOR_DEVICE)


def waited_seconds() -> float:
    """Return how long this process has waited for other ranks since it began, and for its device."""
    return (WAITING.nanoseconds + WAITING_FOR_DEVICE.nanoseconds) / 1e9


def enter_step(done: int, phase: str = TRAINING) -> None:
    """This process has completed `done` steps, and is in a phase."""
    if _writer:
        _writer[0].step(done, phase)


def enter_phase(name: str) -> None:
    """This process is in a phase from now on."""
    if _writer:
        _writer[0].phase(name)


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Inside, this process is in a phase."""
    if not _writer:
        yield
        return
    before = _writer[0].phase(name)
    try:
        yield
    finally:
        _writer[0].phase(before)
