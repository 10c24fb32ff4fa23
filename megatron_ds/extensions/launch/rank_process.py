"""`RankProcess`: a rank of this host, with the last lines of its output, its log, and the file of its places."""

import contextlib
import os
import signal
import subprocess
import time
from collections import deque
from pathlib import Path
from typing import BinaryIO

from ...errors import ConfigError
from ...host.place_file import is_record_written, read_places, request_record
from ...host.places import PLACES_FILE
from .child import Child
from .failures import Failure
from .job import Job, Rank
from .output import write_out
from .recorded_error import RecordedError
from .restarts import USER_ERROR
from .signals import STACKS, dying_with_parent
from .watch import last_place, last_places

FAILED = 1  # exit code of a program that an error of Python ends
LAST_LINES = 25  # of a failed rank's output that are reported


class RankProcess(Child):
    """A process of the job on this host. Raises ConfigError if it cannot be started."""

    def __init__(self, job: Job, host: str, rank: Rank, folder: Path):
        self.rank = rank
        self.number = rank.rank
        self.host = host
        self.error_file = folder / f"error{rank.rank}.json"
        self.places = folder / f"places{rank.rank}"
        self._last: deque[bytes] = deque(maxlen=LAST_LINES)
        self._mark = b""  # before each line
        self._is_asked = False  # for its record
        words = job.program.command(rank.local_rank)
        cores = cores_of(job, host, rank)
        # The error that a rank records is worth more than its last lines.
        files = {
            "TORCHELASTIC_ERROR_FILE": str(self.error_file),
            PLACES_FILE: str(self.places),
        }
        try:
            self.log = _log_file(job, rank)
            super().__init__(
                words,
                job.environment(host, rank, os.environ) | files,
                self._pass_on,
                cwd=job.folder,
                stdin=subprocess.DEVNULL,
                preexec_fn=dying_with_parent(signal.SIGKILL),
            )
        except OSError as error:
            raise ConfigError(
                f"rank {rank.rank} cannot be started on {host} by {words[0]} in {job.folder}: {error}."
            ) from error
        if cores:
            os.sched_setaffinity(self.process.pid, cores)

    @property
    def pid(self) -> int:
        """Return the id of the process that trains: the one that was started, or a child of it."""
        read = read_places(self.places, newest_only=True)
        with contextlib.suppress(OSError):
            if read and os.getsid(read.rank["pid"]) == self.process.pid:
                return read.rank["pid"]
        return self.process.pid

    def _pass_on(self, piece: bytes) -> None:
        """Copy a piece of its output to the agent's output and to the log."""
        self._last.append(piece)
        write_out(self._mark + piece)
        # a full disk must not stop the training
        if self.log is not None:
            with contextlib.suppress(OSError, ValueError):
                self.log.write(piece)
                self.log.flush()

    def failure(self, is_ended: bool = False) -> Failure:
        """Return the report of the rank, which has ended, and whose output was read.

        is_ended: the agent asked it to end; an error that it had recorded before is its cause, and not that signal
        """
        error = RecordedError.read(self.error_file)
        lines = b"".join(self._last).decode(errors="replace")
        code = self.process.returncode
        if is_ended and error.message and code < 0:
            code = FAILED
        return Failure(
            rank=self.number,
            local_rank=self.rank.local_rank,
            host=self.host,
            code=code,
            time=error.time_before(self.ended or time.time()),
            message=error.message or lines,
            log=self.log.name if self.log else "",
            place=last_place(self.places),
            is_passing=error.is_passing if error.message else code != USER_ERROR,
        )

    def print_stacks(self) -> None:
        """Have the rank print its stacks, if it is one of this package: the signal would end another program."""
        if self.poll() is None and read_places(self.places, newest_only=True):
            self._mark = f"[rank {self.number}] ".encode()
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, STACKS)

    def ask_for_record(self) -> None:
        """Have the rank write the record of its collectives, if it has one."""
        self._is_asked = self.poll() is None and request_record(self.places)

    def has_answered(self) -> bool:
        """Return whether the record is written, or the rank has none."""
        is_over = not self._is_asked or self.poll() is not None
        return is_over or is_record_written(self.places)

    def keep_places(self) -> None:
        """Write what the rank did last beside its log."""
        lines = last_places(self.places)
        if self.log is not None and lines:
            path = Path(self.log.name).with_suffix(".places")
            with contextlib.suppress(OSError):
                path.write_text("\n".join([*lines, ""]))


def cores_of(job: Job, host: str, rank: Rank) -> list[int]:
    """Return the cores that a rank is bound to. Raises ConfigError if the host has none of them."""
    cores = job.cores(host, rank)
    number = os.cpu_count() or 1
    if cores and min(cores) >= number:
        raise ConfigError(
            f"rank {rank.rank} is to run on cores {', '.join(map(str, cores))} of {host}, which has {number}, "
            "numbered from 0. Change --bind_core_list."
        )
    return cores


def _log_file(job: Job, rank: Rank) -> BinaryIO | None:
    """Return the open log of a rank; lines are appended to those of an earlier start."""
    if not job.log_folder:
        return None
    Path(job.log_folder).mkdir(parents=True, exist_ok=True)
    return Path(job.log_folder, f"rank{rank.rank}.log").open("ab")
