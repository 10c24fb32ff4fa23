"""Metric sinks: their interface, append-only files, and errors that do not end a run.

A *sink* receives the records of a run and writes them to a file or folder. A full disk or a removed folder
must not cost the run its unsaved steps, so `Tolerant` reports the first error of a sink, tries again with
each later record, and counts the lost records.
"""

import logging
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, Protocol, runtime_checkable

from ...errors import ConfigError
from ...progress.ramps import Progress
from .records import Record

logger = logging.getLogger(__name__)


class Sink(Protocol):
    """Receives the records of a run. place: the file, folder or service, for messages.

    A sink that must send or complete something at the end of a run has `close()`, too.
    """

    place: Path

    def write(self, record: Record) -> None:
        """Write one record completely, or raise OSError and write nothing."""


@runtime_checkable
class Continuing(Protocol):
    """A sink whose files tell the points of this process from those of earlier ones."""

    def begin(self, progress: Progress) -> None:
        """Take note of the progress with which this process starts, before the first record."""


class PointSink(Protocol):
    """Receives points of curves; `Sink` of records is written on top of one. place, `close()`: as there."""

    place: Path | str

    def write(self, values: Mapping[str, float], x: int) -> None:
        """Write a point of each curve completely, or raise OSError."""


class AppendedFile:
    """An append-only file. It is opened for each write, so a folder that was removed is created again.

    header    first bytes of a new file
    is_lines  the file consists of lines: a line cut off by a crash is ended before the next one is written
    """

    def __init__(self, path: Path, header: bytes = b"", is_lines: bool = False):
        self.path = path
        self.header = header
        self.is_lines = is_lines
        self._has_written = False

    def append(self, data: bytes) -> None:
        """Write all of `data`, or raise OSError and leave the file as it was."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "a+b", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            if size == 0:
                if self._has_written:
                    logger.warning(
                        "%s was removed or emptied during the run; it has only records from here "
                        "on.",
                        self.path,
                    )
                data = self.header + data
            elif self.is_lines and not self._has_written and not _ends_a_line(file):
                data = b"\n" + data
            try:
                rest = memoryview(data)
                while rest:
                    rest = rest[file.write(rest) :]
            except OSError:
                with suppress(OSError):
                    file.truncate(size)  # readers fail at an incomplete record
                raise
        self._has_written = True


def _ends_a_line(file: BinaryIO) -> bool:
    file.seek(-1, os.SEEK_END)
    return file.read(1) == b"\n"


class Tolerant:
    """A sink whose I/O errors are reported once and never raised."""

    def __init__(self, sink: Sink):
        self.sink = sink
        self.lost = 0
        self._why = ""

    def write(self, *record: Any) -> None:
        """Write the record, or log the error."""
        try:
            self.sink.write(*record)
        except OSError as error:
            self.lost += 1
            if not self._why:
                logger.warning(
                    "cannot write to %s: %s. Training continues without these records; each new "
                    "record is tried again.",
                    self.sink.place,
                    reason_of(error),
                )
            self._why = reason_of(error)

    def close(self) -> None:
        """Close the sink, and log how many records were lost."""
        try:
            getattr(self.sink, "close", _nothing)()
        except Exception as error:  # of a service's own kind
            logger.warning("cannot complete %s: %s.", self.sink.place, error)
        if self.lost:
            logger.warning(
                "%d record(s) of this run are missing in %s: %s.",
                self.lost,
                self.sink.place,
                self._why,
            )


def _nothing() -> None:
    """What a sink of files does at the end of a run."""


def reason_of(error: OSError) -> str:
    """Return the system's text for the error, such as "No space left on device"."""
    return error.strerror or str(error)


def check_folder(flag: str, folder: Path) -> None:
    """Create the folder. Raises ConfigError, naming the flag, unless files can be created in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        why = "it is a file" if folder.is_file() else reason_of(error)
        raise ConfigError(
            f"{flag}: nothing can be written in {folder} ({why}). Give a folder that this user "
            f"may write to, or omit {flag}."
        ) from error


def check_package(flag: str, module: str, extra: str) -> None:
    """Raises ConfigError unless the module that the sink of a flag needs is installed."""
    try:
        import_module(module)
    except ImportError:
        raise ConfigError(
            f"{flag} needs the package {module}, which is not installed in this Python: pip install "
            f"'megatron_ds[{extra}]'. Or remove it: metrics also go to files, without a package."
        ) from None


def written(path: Path, text: str) -> bool:
    """Return whether the file could be written. Otherwise the text is in the log, and the run continues."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        logger.warning("cannot write %s: %s. It had:", path, reason_of(error))
        logger.warning("%s", text)
        return False
    return True
