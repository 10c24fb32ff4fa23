"""The agent of a node: it starts the ranks of its host, passes their output on, and ends them together.

    python -m megatron_ds.commands.launch.agent --job WORD --host worker-1

Signals that it receives go to its ranks, which save and stop; a second Ctrl-C ends them. When one rank fails, the
others get SIGTERM, and SIGKILL after the job's grace period, and the failure is reported (failures.py). When the
reader of its output is gone, as after a broken connection to the launcher, the ranks are ended likewise: nothing
is left behind on a node.
"""

import argparse
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from ...errors import ConfigError
from .failures import Failure
from .job import Job, Rank

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
LAST_LINES = 25  # of a failed rank's output that are reported
POLL_SECONDS = 0.1
HOST_VARIABLES = ("SLURMD_NODENAME",)
NUMBER_VARIABLES = ("OMPI_COMM_WORLD_RANK", "SLURM_NODEID")


class RankProcess:
    """A rank: its process, the thread that reads its output, and the last lines of it."""

    def __init__(self, job: Job, host: str, rank: Rank, folder: Path):
        self.rank = rank
        self.host = host
        self.log = (
            Path(job.log_folder, f"rank{rank.rank}.log") if job.log_folder else None
        )
        self.error_file = folder / f"error{rank.rank}.json"
        self.last: deque[bytes] = deque(maxlen=LAST_LINES)
        self.ended: float | None = None
        variables = {**os.environ, **job.environment(host, rank)}
        self.process = subprocess.Popen(
            job.program.command(rank.local_rank),
            cwd=job.folder,
            # the error that a rank records is worth more than its last lines
            env=variables | {"TORCHELASTIC_ERROR_FILE": str(self.error_file)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        if cores := job.cores(host, rank):
            os.sched_setaffinity(self.process.pid, cores)
        self._reader = threading.Thread(target=self._pass_on, daemon=True)
        self._reader.start()

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        code = self.process.poll()
        if code is not None and self.ended is None:
            self.ended = time.time()
        return code

    def send(self, number: int) -> None:
        """Send a signal to the rank and all that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def failure(self) -> Failure:
        """Its report. The rank has ended."""
        self._reader.join(timeout=2)  # a child of the rank may hold the pipe
        message, recorded = _recorded_error(self.error_file)
        lines = b"".join(self.last).decode(errors="replace")
        return Failure(
            rank=self.rank.rank,
            local_rank=self.rank.local_rank,
            host=self.host,
            code=self.process.returncode,
            time=recorded or self.ended or time.time(),
            message=message or lines,
            log=str(self.log or ""),
        )

    def _pass_on(self) -> None:
        """Copy the rank's output to the log and to the agent's output, line by line."""
        with contextlib.ExitStack() as stack:
            files: list[BinaryIO] = [sys.stdout.buffer]
            if self.log:
                self.log.parent.mkdir(parents=True, exist_ok=True)
                files.append(stack.enter_context(self.log.open("ab")))
            for line in self.process.stdout:
                self.last.append(line)
                for file in files:
                    # a closed terminal must not stop the log
                    with contextlib.suppress(OSError, ValueError):
                        file.write(line)
                        file.flush()


class Node:
    """All ranks of this host."""

    def __init__(self, job: Job, host: str):
        self.job = job
        self.host = host
        self.ranks: list[RankProcess] = []
        self._received: list[int] = []
        self._kill_time: float | None = None

    def run(self) -> int:
        """Start the ranks and wait for their end; the exit code of the node."""
        for number in FORWARDED:
            signal.signal(number, self._forward)
        with tempfile.TemporaryDirectory(prefix="megatron-ds-") as folder:
            try:
                for rank in self.job.ranks(self.host):
                    self.ranks.append(
                        RankProcess(self.job, self.host, rank, Path(folder))
                    )
                return self._supervise()
            finally:
                for rank in self.ranks:
                    rank.send(signal.SIGKILL)

    def _supervise(self) -> int:
        reported = None
        while True:
            codes = [rank.poll() for rank in self.ranks]
            failed = [rank for rank, code in zip(self.ranks, codes) if code]
            if failed and reported is None:
                reported = self._report(failed)
                self._end()
            if all(code is not None for code in codes):
                return reported.exit_code if reported else 0
            if self._kill_time is None and _reader_is_gone():
                self._end()
            if self._kill_time is not None and time.monotonic() > self._kill_time:
                for rank in self.ranks:
                    rank.send(signal.SIGKILL)
            time.sleep(POLL_SECONDS)

    def _report(self, failed: list[RankProcess]) -> Failure:
        """Print the first failure of this node."""
        found = [rank.failure() for rank in failed]
        first = min(found, key=lambda failure: failure.time)
        with contextlib.suppress(OSError, ValueError):
            print(first.line(), flush=True)
        return first

    def _end(self) -> None:
        """Ask all ranks to stop; they are killed after the grace period."""
        for rank in self.ranks:
            rank.send(signal.SIGTERM)
        self._kill_time = time.monotonic() + self.job.grace_seconds

    def _forward(self, number: int, frame: object) -> None:
        is_second = number == signal.SIGINT and number in self._received
        self._received.append(number)
        for rank in self.ranks:
            rank.send(signal.SIGKILL if is_second else number)


def _recorded_error(path: Path) -> tuple[str, float]:
    """(message, seconds since 1970) of torchrun's error file; ("", 0) without one."""
    try:
        message = json.loads(path.read_text())["message"]
        if isinstance(message, str):
            return message, 0.0
        recorded = float(message["extraInfo"]["timestamp"])
        details = message["extraInfo"].get("py_callstack") or message["message"]
        return str(details), recorded
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return "", 0.0


def _reader_is_gone() -> bool:
    """Whether nothing reads this process's output any more; never of a file or terminal."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def host_of(job: Job, given: str, environ: Mapping[str, str]) -> str:
    """The host of the job that this node is: by the given name or number, else by what Slurm or Open MPI set.

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
    parser = argparse.ArgumentParser(prog="megatron_ds.commands.launch.agent")
    parser.add_argument("--job", required=True, help="the word of a job")
    parser.add_argument("--host", default="", help="name or number of this host")
    args = parser.parse_args(argv)
    job = Job.decoded(args.job)
    return Node(job, host_of(job, args.host, os.environ)).run()


if __name__ == "__main__":
    sys.exit(main())
