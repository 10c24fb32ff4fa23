"""What every metric sink shares: files that are only appended to, and failures that never end a run.

A *sink* takes the records of a run and writes them somewhere. A full disk or a removed folder must not cost the run its
unsaved steps, so `Tolerant` reports the first failure of a sink, tries again with each later record and counts what was lost.
"""

import logging
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from ..errors import ConfigError
from .records import Record

logger = logging.getLogger(__name__)


class Sink(Protocol):
    """Takes the records of a run; `place` is the file or folder that messages name.

    The class of a sink of a training script has `open(config, progress, run_id)`, which returns None when the config does not
    ask for the sink, and `check(config)`, which raises ConfigError when the place that the config names cannot be written to.
    """

    place: Path

    def write(self, record: Record) -> None:
        """Write one record, or raise OSError with nothing of it written."""


class AppendedFile:
    """A file that grows by whole pieces. It is opened for each piece, so a folder removed meanwhile is made again.

    header    first bytes of a new file
    is_lines  the file holds lines: a line cut off by a crash is ended before the next one is written
    """

    def __init__(self, path: Path, header: bytes = b"", is_lines: bool = False):
        self.path, self.header, self.is_lines = path, header, is_lines
        self._has_written = False

    def append(self, data: bytes) -> None:
        """Write all of `data`, or raise OSError and leave the file as it was."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "a+b", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            if size == 0:
                if self._has_written:
                    logger.warning("%s was removed or emptied during the run; it holds only records from here on.", self.path)
                data = self.header + data
            elif self.is_lines and not self._has_written and not _ends_a_line(file):
                data = b"\n" + data
            try:
                rest = memoryview(data)
                while rest:
                    rest = rest[file.write(rest):]
            except OSError:
                with suppress(OSError):
                    file.truncate(size)              # readers stop at half a record
                raise
        self._has_written = True


def _ends_a_line(file) -> bool:
    file.seek(-1, os.SEEK_END)
    return file.read(1) == b"\n"


class Tolerant:
    """A sink whose I/O errors are reported once and never raised."""

    def __init__(self, sink: Sink):
        self.sink = sink
        self.lost = 0
        self._why = ""

    def write(self, record: Record) -> None:
        """Write the record, or report why not."""
        try:
            self.sink.write(record)
        except OSError as error:
            self.lost += 1
            if not self._why:
                logger.warning("cannot write to %s: %s. Training goes on without these records; writing is tried again with "
                               "each new record.", self.sink.place, reason_of(error))
            self._why = reason_of(error)

    def close(self) -> None:
        """Report how many records are missing."""
        if self.lost:
            logger.warning("%d record(s) of this run are missing in %s: %s.", self.lost, self.sink.place, self._why)


def reason_of(error: OSError) -> str:
    """The system's words for the error, such as "No space left on device"."""
    return error.strerror or str(error)


def check_folder(flag: str, folder: Path) -> None:
    """Raises ConfigError, naming the flag, unless files can be made in the folder; makes the folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        why = "it is a file" if folder.is_file() else reason_of(error)
        raise ConfigError(f"{flag}: nothing can be written in {folder} ({why}). Name a place that this user may write to, "
                          f"or leave out {flag}.") from error
