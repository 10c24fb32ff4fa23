"""Run the processes of a launcher: pass their output on, end all when one fails, print the first failure last."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from .failures import Failure, failure_in, first_failure
from .job import Job
from .runners import Started

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
POLL_SECONDS = 0.1


class Processes:
    """The processes that the launcher has started, and the failures that their output reports."""

    def __init__(self, started: Sequence[Started], grace_seconds: float):
        self.failures: list[Failure] = []
        self._grace_seconds = grace_seconds
        self._kill_time: float | None = None
        self._lock = threading.Lock()
        self._processes = [self._start(one) for one in started]
        self._readers = [
            threading.Thread(target=self._read, args=(process,), daemon=True)
            for process in self._processes
        ]
        for reader in self._readers:
            reader.start()

    def _start(self, one: Started) -> subprocess.Popen:
        return subprocess.Popen(
            one.words,
            env={**os.environ, **one.variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C comes to them once, from here
        )

    def wait(self) -> list[int]:
        """Wait for all; when one fails, the others are asked to end. Their exit codes."""
        while True:
            codes = [process.poll() for process in self._processes]
            if any(codes) and self._kill_time is None:
                self.end()
            if all(code is not None for code in codes):
                break
            if self._kill_time is not None and time.monotonic() > self._kill_time:
                self.send(signal.SIGKILL)
            time.sleep(POLL_SECONDS)
        for reader in self._readers:
            reader.join(timeout=5)
        return codes

    def end(self) -> None:
        """Ask all to end. An agent gives its ranks the grace period, so this waits longer than that."""
        self.send(signal.SIGTERM)
        self._kill_time = time.monotonic() + self._grace_seconds + 10

    def send(self, number: int) -> None:
        """Send a signal to all."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)

    def _read(self, process: subprocess.Popen) -> None:
        for line in process.stdout:
            failure = failure_in(line.decode(errors="replace"))
            with self._lock:
                if failure is not None:
                    self.failures.append(failure)
                    continue
                with contextlib.suppress(OSError, ValueError):
                    sys.stdout.buffer.write(line)
                    sys.stdout.buffer.flush()


def run_all(
    job: Job, started: Sequence[Started], quiet: bool = False, writes_pid: bool = False
) -> int:
    """Run the processes; the exit code of the job: 0, or that of the rank that failed first."""
    if not quiet:
        _say(f"{job.world_size} ranks on {_hosts_text(job)}")
    processes = Processes(started, job.grace_seconds)
    for number in FORWARDED:
        signal.signal(number, lambda number, _: processes.send(number))
    with _pid_file() if writes_pid else contextlib.nullcontext():
        codes = processes.wait()
    failure = first_failure(processes.failures)
    if failure is not None:
        _say(failure.text())
        return failure.exit_code
    failed = next((code for code in codes if code), 0)
    if failed:
        words = started[codes.index(failed)].words
        _say(f"{words[0]} ended with code {failed} before any rank reported an error")
    return failed if failed >= 0 else 128 - failed


def _say(text: str) -> None:
    sys.stdout.flush()
    print(f"megatron-ds launch: {text}", file=sys.stderr, flush=True)


def _hosts_text(job: Job) -> str:
    listed = [f"{host} ({len(slots)})" for host, slots in job.slots.items()]
    more = len(listed) - 8
    return ", ".join(listed[:8]) + (f" and {more} more hosts" if more > 0 else "")


@contextlib.contextmanager
def _pid_file() -> Iterator[None]:
    """A file with the launcher's process id, as DeepSpeed's --save_pid writes it."""
    path = Path(tempfile.gettempdir(), f"{os.getpid()}.deepspeed")
    path.write_text(f"{os.getpid()}\n")
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
