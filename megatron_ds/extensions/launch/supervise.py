"""Run the processes of a launcher: pass their output on, end all when one fails, print the first failure last."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

from .failures import Failure, failure_in, first_failure
from .job import Job
from .output import pieces
from .rank_places import NodeReport, report_in
from .restarts import Ended
from .runners import Means, Runner, Started
from .signals import (
    END,
    FORWARDED,
    KILL,
    LAST_SECONDS,
    RECORD_SECONDS,
    STACKS,
    dying_with_parent,
)
from .stalls import HANG_CODE, Hang, Stalls

POLL_SECONDS = 0.1
STACK_SECONDS = 1.0  # in which ranks print their stacks
CONNECTION_SECONDS = 10.0  # more than the ranks have, for what is between
MARKS = b"::megatron-ds "  # before the reports of agents


class Processes:
    """The processes that the launcher has started, and the failures that their output reports."""

    def __init__(self, job: Job, runner: Runner, means: Means):
        self.failures: list[Failure] = []
        self.hang: Hang | None = None
        self._named: float | None = None  # when a rank that does not move was named
        seen = [means.host] if means.host else job.hosts
        self._hosts = seen
        self.stalls = Stalls(seen, sees_all=len(seen) == len(job.hosts))
        self.commands = runner.start(job, means)
        self._job = job
        self._runner = runner
        self._means = means
        self._pending: deque[int] = deque()
        self._received: list[int] = []
        self._kill_time: float | None = None
        self._killed: set[int] = set()  # positions of processes that were killed here
        self._lock = threading.Lock()
        # The processes, with a thread for the output of each.
        source = subprocess.PIPE if runner.has_input else subprocess.DEVNULL
        first = dying_with_parent(signal.SIGTERM) if runner.stays else None
        self._processes = [
            _started(one, source, subprocess.PIPE, first) for one in self.commands
        ]
        self._signallers: list[subprocess.Popen] = []
        self._readers = [
            threading.Thread(target=self._read, args=(process,), daemon=True)
            for process in self._processes
        ]
        for reader in self._readers:
            reader.start()

    def request(self, number: int) -> None:
        """Have the signal sent soon. This is what a signal handler may call."""
        self._pending.append(number)

    def wait(self) -> None:
        """Wait for all; when one fails, the others are asked to end."""
        while True:
            while self._pending:
                self._forward(self._pending.popleft())
            codes = [process.poll() for process in self._processes]
            # The first failure ends the job at once: other ranks would wait for the one that is gone.
            if (self.failures or any(codes)) and self._kill_time is None:
                self.end()
            if all(code is not None for code in codes):
                break
            if self._kill_time is None:
                self._look_for_hang()
            if self._kill_time is not None and time.monotonic() > self._kill_time:
                running = [i for i, code in enumerate(codes) if code is None]
                self._killed.update(running)
                self._send_here(signal.SIGKILL)
            time.sleep(POLL_SECONDS)
        for reader in self._readers:
            reader.join(timeout=5)
        for signaller in self._signallers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                signaller.wait(timeout=5)

    @property
    def code(self) -> int:
        """Return the exit code of the first process that failed by itself, else of one that was killed here."""
        positions = range(len(self._processes))
        by_cause = sorted(positions, key=lambda i: i in self._killed)
        codes = [self._processes[i].returncode for i in by_cause]
        code = next(filter(None, codes), 0)
        return code if code >= 0 else 128 - code

    def lost(self) -> list[str]:
        """Return the hosts that were lost. All processes have ended."""
        ended = set(range(len(self._processes))) - self._killed
        hosts = self._hosts
        # One process may be the connection to all hosts.
        if len(self._processes) > 1:
            hosts = [hosts[i] for i in sorted(ended)]
        elif not ended:
            hosts = []
        return self.stalls.lost(hosts)

    def end(self) -> None:
        """Ask all to end. An agent gives its ranks the grace period, so this waits longer than that."""
        self._send(END)
        self._kill_time = (
            time.monotonic() + self._job.grace_seconds + CONNECTION_SECONDS
        )

    def _look_for_hang(self) -> None:
        """Name a rank that does not move, and end the job if it still does not after `end_seconds`."""
        hang = self.stalls.hang()
        if hang is None:
            if self._named is not None:
                note("the ranks move again")
            self._named = None
        elif self._named is None:
            self._named = time.monotonic()
            self._name(hang)
        if hang is None or self._named is None:
            return
        if time.monotonic() - self._named >= self._job.end_seconds:
            self._end_hanging(hang)

    def _name(self, hang: Hang) -> None:
        """Print which rank does not move, the places of all, and the stacks of all."""
        ends = f"The job ends if it does not move for {self._job.end_seconds:g} s more"
        note(f"{hang.table}\n{hang.text} {ends}. The stacks of all ranks follow.")
        self._send(STACKS)
        time.sleep(STACK_SECONDS)

    def _end_hanging(self, hang: Hang) -> None:
        self.hang = hang
        self._send(KILL)
        seconds = RECORD_SECONDS + LAST_SECONDS + CONNECTION_SECONDS
        self._kill_time = time.monotonic() + seconds

    def _forward(self, number: int) -> None:
        """Pass a signal on. A second Ctrl-C shortens the time until processes are killed."""
        if number == signal.SIGINT and number in self._received:
            self._kill_time = time.monotonic() + CONNECTION_SECONDS
        self._received.append(number)
        self._send(number)

    def _send(self, number: int) -> None:
        """Send a signal to all agents."""
        if self._runner.signals is not None:
            for one in self._runner.signals(self._job, self._means, number):
                nothing = subprocess.DEVNULL
                self._signallers.append(_started(one, nothing, nothing))
        elif self._runner.has_input:
            for process in self._processes:
                assert process.stdin is not None  # a pipe, with `has_input`
                with contextlib.suppress(OSError):
                    process.stdin.write(f"{int(number)}\n".encode())
                    process.stdin.flush()
        else:
            self._send_here(number)

    def _send_here(self, number: int) -> None:
        """Send a signal to the processes that were started here."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)

    def _read(self, process: subprocess.Popen) -> None:
        """Pass the output of a process on, and keep the failures that it reports."""
        assert process.stdout is not None  # a pipe
        for line in pieces(process.stdout):
            text = line.decode(errors="replace")
            failure = failure_in(text, time.time())
            report = report_in(text)
            with self._lock:
                if failure is not None:
                    self.failures.append(failure)
                if report is not None:
                    self.stalls.add(report)
                with contextlib.suppress(OSError, ValueError):
                    sys.stdout.buffer.write(_of_ranks(line, failure or report))
                    sys.stdout.buffer.flush()


def _of_ranks(line: bytes, report: Failure | NodeReport | None) -> bytes:
    """Return the part of a line that ranks have written, without a report and without the host that pdsh adds.

    A rank that did not end its last line leaves a part before a report.
    """
    if report is None:
        return line
    before = line.partition(MARKS)[0]
    return before.removeprefix(f"{report.host}: ".encode())


def _started(
    one: Started,
    source: int,
    output: int,
    first: Callable[[], object] | None = None,
) -> subprocess.Popen:
    """first: what the new process calls"""
    return subprocess.Popen(
        one.words,
        env={**os.environ, **one.variables},
        stdin=source,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C comes to them once, from here
        preexec_fn=first,
    )


class Requests:
    """The signals that this process receives for its job. received: their numbers"""

    def __init__(self):
        self.received: list[int] = []
        self._unsent: list[int] = []  # received while there were no processes
        self._processes: Processes | None = None

    def install(self) -> None:
        """Handle them from now on."""
        for number in FORWARDED:
            signal.signal(number, self._handle)

    def go_to(self, processes: Processes | None) -> None:
        """Pass signals on to these processes, also those that came when there were none."""
        self._processes = processes
        while processes is not None and self._unsent:
            processes.request(self._unsent.pop(0))

    def pause(self, seconds: float) -> bool:
        """Wait; False if a signal has come, then or before."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self.received:
            time.sleep(POLL_SECONDS)
        return not self.received

    def _handle(self, number: int, frame: object) -> None:
        self.received.append(number)
        if self._processes is None:
            self._unsent.append(number)
        else:
            self._processes.request(number)


def run_all(
    job: Job, runner: Runner, means: Means, requests: Requests, quiet: bool = False
) -> Ended:
    """Run a job. Its exit code is 0, or that of the rank that failed first."""
    if not quiet:
        note(ranks_text(job))
    processes = Processes(job, runner, means)
    requests.go_to(processes)
    processes.wait()
    requests.go_to(None)
    step = processes.stalls.step
    was_asked = bool(requests.received)
    # A hang explains the failures that follow it, so it alone is printed.
    if (hang := processes.hang) is not None:
        note(f"{hang.table}\n{hang.text}")
        return Ended(HANG_CODE, hang.host, step, was_asked)
    failure = first_failure(processes.failures)
    code = processes.code
    if failure is not None:
        note(failure.text())
        code = failure.exit_code
    lost = processes.lost() if code else []
    if lost:
        note(
            f"no end was reported by the agent of {', '.join(lost)}: it was killed, or the host or the connection "
            "to it is down"
        )
        return Ended(code, lost[0], step, was_asked)
    if failure is None:
        return Ended(code, "", step, was_asked)
    is_final = was_asked or not failure.is_passing
    return Ended(code, failure.host, step, is_final, failure.cause)


def note(text: str) -> None:
    """Print a line of the launcher itself."""
    sys.stdout.flush()
    print(f"megatron-ds launch: {text}", file=sys.stderr, flush=True)


def ranks_text(job: Job) -> str:
    """Return the number of ranks, and the hosts with that of each: "3 ranks on n1 (1), n2 (2)"."""
    ranks = "rank" if job.world_size == 1 else "ranks"
    listed = [f"{host} ({len(slots)})" for host, slots in job.slots.items()]
    more = len(listed) - 8
    others = f" and {more} more hosts" if more > 0 else ""
    return f"{job.world_size} {ranks} on {', '.join(listed[:8])}{others}"


@contextlib.contextmanager
def pid_of_launcher() -> Iterator[None]:
    """A file with the launcher's process id, as DeepSpeed's --save_pid writes it."""
    path = Path(tempfile.gettempdir(), f"{os.getpid()}.deepspeed")
    path.write_text(f"{os.getpid()}\n")
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
