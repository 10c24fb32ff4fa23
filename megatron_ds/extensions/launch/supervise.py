"""Run the processes of a launcher: pass their output on, end all when one fails, print the first failure last."""

import contextlib
import math
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import compress
from pathlib import Path

from .child import POLL_SECONDS, Child
from .failures import Failure, failure_in, first_failure
from .job import Job
from .notes import note
from .output import write_out
from .rank_places import NodeReport, report_in
from .restarts import Ended
from .runners import Means, Runner
from .signal_requests import Requests
from .signals import END, KILL, LAST_SECONDS, RECORD_SECONDS, STACKS, dying_with_parent
from .stalls import HANG_CODE, Hang, Stalls

STACK_SECONDS = 1.0  # in which ranks print their stacks
CONNECTION_SECONDS = 10.0  # more than the ranks have, for what is between
MARKS = b"::megatron-ds "  # before the reports of agents


class Processes:
    """The processes that the launcher has started, and the failures that their output reports."""

    def __init__(self, job: Job, runner: Runner, means: Means, requests: Requests):
        self.failures: list[Failure] = []
        self.hang: Hang | None = None
        self._named: float | None = None  # when a rank that does not move was named
        self._hosts = [means.host] if means.host else job.hosts
        sees_all = len(self._hosts) == len(job.hosts)
        self.stalls = Stalls(self._hosts, sees_all)
        self._job = job
        self._runner = runner
        self._means = means
        self._requests = requests
        self._kill_time = math.inf
        self._killed: set[Child] = set()  # of the processes, by this one
        # The processes; those that signal others come later.
        self._signallers: list[Child] = []
        self._processes = [
            Child(
                one.words,
                one.variables,
                self._pass_on,
                stdin=subprocess.PIPE if runner.has_input else subprocess.DEVNULL,
                preexec_fn=dying_with_parent(signal.SIGTERM) if runner.stays else None,
            )
            for one in runner.start(job, replace(means, listens=runner.has_input))
        ]
        for process in self._processes:
            process.read()

    def wait(self) -> None:
        """Wait for all; when one fails, the others are asked to end."""
        while None in (codes := [process.poll() for process in self._processes]):
            for number in self._requests.new():
                self._forward(number)
            # The first failure ends the job at once: other ranks would wait for the one that is gone.
            if self._kill_time == math.inf:
                if self.failures or any(codes):
                    self.end()
                else:
                    self._look_for_hang()
            elif time.monotonic() > self._kill_time:
                running = [p for p in self._processes if p.ended is None]
                self._killed.update(running)
                self._send_here(signal.SIGKILL)
            time.sleep(POLL_SECONDS)
        for process in self._processes:
            process.read_to_end()
        for signaller in self._signallers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                signaller.process.wait(timeout=5)

    @property
    def code(self) -> int:
        """Return the exit code of the first process that failed by itself, else of one that was killed here."""
        by_cause = sorted(self._processes, key=self._killed.__contains__)
        code = next(filter(None, (process.poll() for process in by_cause)), 0)
        return code if code >= 0 else 128 - code

    def lost(self) -> list[str]:
        """Return the hosts that were lost. All processes have ended."""
        ended = [process not in self._killed for process in self._processes]
        # One process may be the connection to all hosts.
        if len(ended) == 1:
            ended *= len(self._hosts)
        return self.stalls.lost([*compress(self._hosts, ended)])

    def end(self) -> None:
        """Ask all to end. An agent gives its ranks the grace period, so this waits longer than that."""
        self._send(END)
        self._kill_after(self._job.grace_seconds)

    def _kill_after(self, seconds: float) -> None:
        """Kill the processes that run after some seconds, and CONNECTION_SECONDS."""
        self._kill_time = time.monotonic() + seconds + CONNECTION_SECONDS

    def _look_for_hang(self) -> None:
        """Name a rank that does not move, and end the job if it still does not after `end_seconds`."""
        hang = self.stalls.hang()
        if hang is None:
            if self._named is not None:
                note("the ranks move again")
            self._named = None
            return
        if self._named is None:
            self._named = time.monotonic()
            self._name(hang)
        # Ranks print their stacks before they end.
        seconds = max(self._job.end_seconds, STACK_SECONDS)
        if time.monotonic() - self._named >= seconds:
            self.hang = hang
            self._send(KILL)
            self._kill_after(RECORD_SECONDS + LAST_SECONDS)

    def _name(self, hang: Hang) -> None:
        """Print which rank does not move, the places of all, and the stacks of all."""
        ends = f"The job ends if it does not move for {self._job.end_seconds:g} s more"
        note(f"{hang.table}\n{hang.text} {ends}. The stacks of all ranks follow.")
        self._send(STACKS)

    def _forward(self, number: int) -> None:
        """Pass a signal on. A second Ctrl-C shortens the time until processes are killed."""
        if self._requests.are_urgent:
            self._kill_after(0.0)
        self._send(number)

    def _send(self, number: int) -> None:
        """Send a signal to all agents."""
        if self._runner.signals is not None:
            nothing = subprocess.DEVNULL
            ignore = lambda piece: None
            for one in self._runner.signals(self._job, self._means, number):
                signaller = Child(one.words, one.variables, ignore, stdin=nothing)
                signaller.read()
                self._signallers.append(signaller)
        elif self._runner.has_input:
            for process in self._processes:
                process.write(f"{int(number)}\n".encode())
        else:
            self._send_here(number)

    def _send_here(self, number: int) -> None:
        """Send a signal to the processes that were started here."""
        for process in self._processes:
            process.send(number)

    def _pass_on(self, line: bytes) -> None:
        """Pass a line of the output of a process on, and keep the failure that it reports."""
        text = line.decode(errors="replace")
        failure = failure_in(text, time.time())
        report = report_in(text)
        if failure is not None:
            self.failures.append(failure)
        if report is not None:
            self.stalls.add(report)
        write_out(_of_ranks(line, failure or report))


def _of_ranks(line: bytes, report: Failure | NodeReport | None) -> bytes:
    """Return the part of a line that ranks have written, without a report and without the host that pdsh adds.

    A rank that did not end its last line leaves a part before a report.
    """
    if report is None:
        return line
    before = line.partition(MARKS)[0]
    return before.removeprefix(f"{report.host}: ".encode())


def run_all(
    job: Job, runner: Runner, means: Means, requests: Requests, quiet: bool = False
) -> Ended:
    """Run a job. Its exit code is 0, or that of the rank that failed first."""
    if not quiet:
        note(ranks_text(job))
    processes = Processes(job, runner, means, requests)
    processes.wait()
    step = processes.stalls.step
    was_asked = bool(requests.received)
    # A hang explains the failures that follow it, so it alone is printed.
    if (hang := processes.hang) is not None:
        note(f"{hang.table}\n{hang.text}")
        return Ended(HANG_CODE, hang.host, step, was_asked)
    failure = first_failure(processes.failures)
    code = processes.code
    if failure is not None:
        note(failure.text(), kept=failure.message)
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
