"""The agent of a node: it starts the ranks of its host, passes their output on, and ends them together.

    python -m megatron_ds.extensions.launch.agent --job WORD --host worker-1

Signals that it receives go to its ranks, which save and stop; a second Ctrl-C ends them. When one rank fails, the
others get SIGTERM, and SIGKILL after the job's grace period, and the failure is reported (failures.py). The same
happens on SIGHUP, and when the reader of its output is gone, as after a broken connection to the launcher. Ranks of
an agent that is killed are killed, too: nothing is left behind on a node.
"""

import argparse
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ...cli import main_guard
from ...errors import CommunicationError, ConfigError
from ...host.place_file import is_record_written, read_places, request_record
from ...host.places import PLACES_FILE
from ...launch_env import unresolved
from .failures import Failure, first_failure
from .job import Job, Rank
from .memory_folder import folder_in_memory
from .output import pieces
from .program_check import reason_against
from .rank_places import NodeReport
from .restarts import USER_ERROR
from .signals import (
    END,
    FORWARDED,
    KILL,
    LAST_SECONDS,
    RECORD_SECONDS,
    STACKS,
    dying_with_parent,
    pid_file,
)
from .watch import Watch, last_place, last_places

LAST_LINES = 25  # of a failed rank's output that are reported
POLL_SECONDS = 0.1
LAST_OUTPUT_SECONDS = 2.0  # after the end of a rank, to read what it wrote
HOST_VARIABLES = ("SLURMD_NODENAME",)
NUMBER_VARIABLES = ("OMPI_COMM_WORLD_RANK", "SLURM_NODEID")
REPORT_SECONDS = 1.0  # between two reports of the places of ranks
SIGNAL_WORDS = {str(int(number)) for number in (*FORWARDED, END, STACKS, KILL)}


class RankProcess:
    """A rank: its process, the thread that reads its output, and the last lines of it.

    Raises ConfigError if it cannot be started.
    """

    def __init__(self, job: Job, host: str, rank: Rank, folder: Path):
        self.rank = rank
        self.number = rank.rank
        self.host = host
        self.error_file = folder / f"error{rank.rank}.json"
        self.places = folder / f"places{rank.rank}"
        self.last: deque[bytes] = deque(maxlen=LAST_LINES)
        self.ended: float | None = None
        self._mark = b""  # before each line
        self._is_asked = False  # for its record
        words = job.program.command(rank.local_rank)
        variables = {**os.environ, **job.environment(host, rank, os.environ)}
        cores = _cores(job, host, rank)
        try:
            self.log = _log_file(job, rank)
            self.process = subprocess.Popen(
                words,
                cwd=job.folder,
                # the error that a rank records is worth more than its last lines
                env=variables
                | {
                    "TORCHELASTIC_ERROR_FILE": str(self.error_file),
                    PLACES_FILE: str(self.places),
                },
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=dying_with_parent(signal.SIGKILL),
            )
        except OSError as error:
            raise ConfigError(
                f"rank {rank.rank} cannot be started on {host} by {words[0]} in {job.folder}: {error}."
            ) from error
        if cores:
            os.sched_setaffinity(self.process.pid, cores)
        self._reader = threading.Thread(target=self._pass_on, daemon=True)

    def read(self) -> None:
        """Begin to read its output."""
        self._reader.start()

    def read_to_end(self) -> None:
        """Wait until all its output is read, at most LAST_OUTPUT_SECONDS after its end: a child may hold the pipe."""
        assert self.ended is not None, f"rank {self.number} runs"
        self._reader.join(
            timeout=max(0.0, self.ended + LAST_OUTPUT_SECONDS - time.time())
        )

    @property
    def pid(self) -> int:
        """Return the id of the process that trains: the one that was started, or a child of it."""
        read = read_places(self.places, newest_only=True)
        with contextlib.suppress(OSError):
            if read and os.getsid(read.rank["pid"]) == self.process.pid:
                return read.rank["pid"]
        return self.process.pid

    def poll(self) -> int | None:
        """Return the exit code; None while it runs."""
        code = self.process.poll()
        if code is not None and self.ended is None:
            self.ended = time.time()
        return code

    def send(self, number: int) -> None:
        """Send a signal to the rank and all that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def failure(self) -> Failure:
        """Return the report of the rank, which has ended."""
        self.read_to_end()
        error = _recorded_error(self.error_file)
        lines = b"".join(self.last).decode(errors="replace")
        code = self.process.returncode
        return Failure(
            rank=self.rank.rank,
            local_rank=self.rank.local_rank,
            host=self.host,
            code=code,
            time=_time_of_error(error.time, self.ended or time.time()),
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

    def _pass_on(self) -> None:
        """Copy the rank's output to the log and to the agent's output, as it comes."""
        assert self.process.stdout is not None  # a pipe
        for piece in pieces(self.process.stdout):
            self.last.append(piece)
            # a closed terminal must not stop the log, nor a full disk the training
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.buffer.write(self._mark + piece)
                sys.stdout.buffer.flush()
            if self.log is None:
                continue
            with contextlib.suppress(OSError, ValueError):
                self.log.write(piece)
                self.log.flush()


class Node:
    """All ranks of this host."""

    def __init__(self, job: Job, host: str):
        self.job = job
        self.host = host
        self.ranks: list[RankProcess] = []
        self._received: list[int] = []
        self._held: list[int] | None = []  # signals for ranks that have not started
        self._end_time: float | None = None
        self._record_end: float | None = None  # until which ranks write their records

    def run(self, listens: bool = False) -> int:
        """Start the ranks, wait for their end, and return the exit code of the node.

        listens: signals come by this process's input, too
        """
        for number in FORWARDED:
            signal.signal(number, self._forward)
        signal.signal(END, lambda *_: self._end())
        signal.signal(KILL, lambda *_: self._kill())
        signal.signal(STACKS, lambda *_: self._print_stacks())
        with (
            pid_file(self.job, self.host),
            folder_in_memory() as folder,
        ):
            try:
                self._start(folder)
                if listens:
                    threading.Thread(target=_listen, daemon=True).start()
                return self._supervise()
            except (ConfigError, CommunicationError) as error:
                self._report_no_start(error)
                return USER_ERROR
            finally:
                for started in self.ranks:
                    started.send(signal.SIGKILL)

    def _start(self, folder: Path) -> None:
        """Start all ranks. Raises ConfigError where this host has no program for them."""
        job = self.job
        ranks = list(job.ranks(self.host))
        variables = os.environ | job.environment(self.host, ranks[0], os.environ)
        reason = reason_against(job.program, Path(job.folder), variables)
        if reason:
            raise ConfigError(f"no rank can be started on {self.host}: {reason}.")
        _check_address(self.host, job.master_address)
        for rank in ranks:
            self.ranks.append(RankProcess(job, self.host, rank, folder))
        # threads begin after the last fork
        for started in self.ranks:
            started.read()
        self._send_held()

    def _report_no_start(self, error: ConfigError | CommunicationError) -> None:
        """Print the failure of the first rank of this node. Another start may mend a CommunicationError only."""
        first = next(self.job.ranks(self.host))
        failure = Failure(
            rank=first.rank,
            local_rank=first.local_rank,
            host=self.host,
            code=USER_ERROR,
            time=time.time(),
            message=str(error),
            is_passing=isinstance(error, CommunicationError),
        )
        _print_line(failure, time.time())
        _print_line(NodeReport(self.host, is_last=True))

    def _supervise(self) -> int:
        is_reported = False
        watch = Watch(self.job, self.host, self.ranks)
        next_look = time.monotonic()
        while True:
            codes = [rank.poll() for rank in self.ranks]
            # The first failure is reported at once, so that the launcher ends the other nodes.
            if not is_reported and any(codes):
                is_reported = True
                self._report()
                self._end()
            if all(code is not None for code in codes):
                break
            # A connection that cannot send these lines notices that the launcher is gone.
            if time.monotonic() > next_look:
                next_look = time.monotonic() + REPORT_SECONDS
                report = watch.look() if self.job.hang_seconds else None
                _print_line(report or NodeReport(self.host))
            if self._record_end is not None:
                self._end_hanging(self._record_end)
            # Without a launcher nothing else would end the ranks.
            if self._end_time is None and _reader_is_gone():
                self._end()
            if self._end_time is not None:
                if time.time() > self._end_time + self.job.grace_seconds:
                    self._send(signal.SIGKILL)
            time.sleep(POLL_SECONDS)
        # The threads that read output end with this process, and what they have not read yet would be lost.
        for rank in self.ranks:
            rank.read_to_end()
        # By the last report the launcher learns that the node has ended.
        _print_line(watch.look(is_last=True) or NodeReport(self.host, is_last=True))
        if any(codes):
            for rank in self.ranks:
                rank.keep_places()
        # An earlier error may have been recorded by a rank that took longer to end.
        first = self._report()
        return first.exit_code if first else max(abs(code or 0) for code in codes)

    def _report(self) -> Failure | None:
        """Print and return the first failure of this node, without ranks that ended on request."""
        found = [
            rank.failure()
            for rank in self.ranks
            if rank.poll() and (self._ended_alone(rank) or rank.error_file.exists())
        ]
        first = first_failure(found)
        if first is not None:
            _print_line(first, time.time())
        return first

    def _ended_alone(self, rank: RankProcess) -> bool:
        assert rank.ended is not None, f"rank {rank.number} runs"
        return self._end_time is None or rank.ended < self._end_time

    def _end(self) -> None:
        """Ask all ranks to stop; `_supervise` kills them after the grace period."""
        if self._end_time is None:
            self._end_time = time.time()
            self._send(signal.SIGTERM)

    def _kill(self) -> None:
        """End ranks that hang. Those with a GPU first write their last collectives."""
        if self._record_end is None:
            self._record_end = time.time() + RECORD_SECONDS
            for rank in self.ranks:
                rank.ask_for_record()

    def _end_hanging(self, record_end: float) -> None:
        """Send SIGTERM when the records are written or at `record_end`, and SIGKILL soon after: ranks that hang save
        nothing more."""
        now = time.time()
        answered = all(rank.has_answered() for rank in self.ranks)
        if self._end_time is None and (answered or now > record_end):
            self._end_time = now
            self._send(signal.SIGTERM)
        if self._end_time is not None and now > self._end_time + LAST_SECONDS:
            self._send(signal.SIGKILL)

    def _print_stacks(self) -> None:
        for rank in self.ranks:
            rank.print_stacks()

    def _forward(self, number: int, frame: object) -> None:
        is_second = number == signal.SIGINT and number in self._received
        self._received.append(number)
        if self._held is None:
            self._send(signal.SIGKILL if is_second else number)
        else:
            self._held.append(number)

    def _send_held(self) -> None:
        """Send the signals that came before all ranks had started."""
        held = self._held or []
        self._held = None
        for number in held:
            self._send(number)
        if self._end_time is not None:
            self._send(signal.SIGTERM)

    def _send(self, number: int) -> None:
        for rank in self.ranks:
            rank.send(number)


def _check_address(host: str, address: str) -> None:
    """Raise CommunicationError if this host does not find rank 0 by its name: ranks would wait in silence."""
    if problem := unresolved(address):
        raise CommunicationError(
            f"no rank can be started on {host}: {problem}. Give --master_addr an address of rank 0's host that all "
            "hosts know, or enter the name into the DNS or /etc/hosts of each host."
        )


def _listen() -> None:
    """Send this process the signals whose numbers come by its input; END when the input ends."""
    for line in sys.stdin:
        if line.strip() in SIGNAL_WORDS:
            os.kill(os.getpid(), int(line))
    os.kill(os.getpid(), END)


def _cores(job: Job, host: str, rank: Rank) -> list[int]:
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


def _print_line(report: Failure | NodeReport | None, *arguments: float) -> None:
    """Print the line of a report, if there is one; the reader of the output may be gone."""
    if report is not None:
        # With a single write no line of a rank, which another thread passes on, can come between.
        line = f"{report.line(*arguments)}\n"
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.buffer.write(line.encode())
            sys.stdout.buffer.flush()


def _time_of_error(recorded: float, ended: float) -> float:
    """Return when a rank failed, in seconds since 1970. recorded: in whole seconds, 0 for nothing; later than the end
    for an error that follows from that of another rank."""
    if not recorded:
        return ended
    return recorded if recorded > ended else min(ended, recorded + 1)


@dataclass(frozen=True)
class _Recorded:
    """An error as the rank recorded it. time: seconds since 1970, 0 if it is not known"""

    message: str = ""
    time: float = 0.0
    is_passing: bool = True


def _recorded_error(path: Path) -> _Recorded:
    """Return the error in torchrun's error file; without the file, an error without a message."""
    try:
        message = json.loads(path.read_text())["message"]
        if isinstance(message, str):
            return _Recorded(message)
        info = message["extraInfo"]
        return _Recorded(
            str(info.get("py_callstack") or message["message"]),
            float(info["timestamp"]),
            bool(info.get("is_passing", True)),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return _Recorded()


def _reader_is_gone() -> bool:
    """Return whether nothing reads this process's output any more; False for a file or terminal."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def host_of(job: Job, given: str, environ: Mapping[str, str]) -> str:
    """Return which host of the job this node is: by the given name or number, else by what Slurm or Open MPI set.

    Raises ConfigError if the job has none of these.
    """
    names = [given, *(environ.get(name, "") for name in HOST_VARIABLES)]
    numbers = [given, *(environ.get(name, "") for name in NUMBER_VARIABLES)]
    for name in names:
        if name in job.slots:
            return name
    for number in numbers:
        if number.isdigit() and int(number) < len(job.slots):
            return job.hosts[int(number)]
    tried = ", ".join(word for word in {*names, *numbers} if word) or "no name"
    raise ConfigError(
        f"this node ({tried}) is none of the job's hosts: {', '.join(job.hosts)}. Give --host."
    )


def main(argv: list[str] | None = None) -> int:
    """Run the agent; its exit code."""
    parser = argparse.ArgumentParser(prog="megatron_ds.extensions.launch.agent")
    parser.add_argument("--job", required=True, help="the word of a job")
    parser.add_argument("--host", default="", help="name or number of this host")
    parser.add_argument("--listen", action="store_true", help="signals come by stdin")
    args = parser.parse_args(argv)
    job = Job.decoded(args.job)
    return Node(job, host_of(job, args.host, os.environ)).run(args.listen)


if __name__ == "__main__":
    sys.exit(main_guard(main, rank=0))
