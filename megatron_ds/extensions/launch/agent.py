"""The agent of a node: it starts the ranks of its host, passes their output on, and ends them together.

    python -m megatron_ds.extensions.launch.agent --job WORD --host worker-1

Signals that it receives go to its ranks, which save and stop; a second Ctrl-C ends them. When one rank fails, the
others get SIGTERM, and SIGKILL after the job's grace period, and the failure is reported (failures.py). The same
happens on SIGHUP, and when the reader of its output is gone, as after a broken connection to the launcher. Ranks of
an agent that is killed are killed, too: nothing is left behind on a node.
"""

import argparse
import math
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from ...cli import main_guard
from ...errors import CommunicationError, ConfigError
from ...launch_env import unresolved
from .child import POLL_SECONDS
from .failures import Failure, first_failure
from .job import Job
from .memory_folder import folder_in_memory
from .output import write_out
from .program_check import reason_against
from .rank_places import NodeReport
from .rank_process import RankProcess
from .restarts import USER_ERROR
from .signal_requests import Requests
from .signals import (
    END,
    FORWARDED,
    KILL,
    LAST_SECONDS,
    RECORD_SECONDS,
    STACKS,
    pid_file,
)
from .watch import Watch

HOST_VARIABLES = ("SLURMD_NODENAME",)
NUMBER_VARIABLES = ("OMPI_COMM_WORLD_RANK", "SLURM_NODEID")
REPORT_SECONDS = 1.0  # between two reports of the places of ranks


class Node:
    """All ranks of this host."""

    def __init__(self, job: Job, host: str):
        self.job = job
        self.host = host
        self.ranks: list[RankProcess] = []
        self._requests = Requests()
        self._actions: dict[int, Callable[[], None]] = {
            END: self._end,
            KILL: self._kill,
            STACKS: self._print_stacks,
        }
        self._end_time = math.inf  # when ranks were asked to end
        self._kill_time = math.inf  # when those that run are killed
        self._record_end = math.inf  # until which ranks that hang write their records

    def run(self, listens: bool = False) -> int:
        """Start the ranks, wait for their end, and return the exit code of the node.

        listens: signals come by this process's input, too
        """
        self._requests.install([*FORWARDED, *self._actions])
        with (
            pid_file(self.job, self.host),
            folder_in_memory() as folder,
        ):
            try:
                self._start(folder)
                if listens:
                    threading.Thread(target=self._listen, daemon=True).start()
                return self._supervise()
            except (ConfigError, CommunicationError) as error:
                self._report_no_start(error)
                return USER_ERROR
            finally:
                self._send(signal.SIGKILL)

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
        for started in self.ranks:
            started.read()

    def _listen(self) -> None:
        """Take the signals whose numbers come by this process's input; END when the input ends."""
        numbers = {str(int(one)): one for one in (*FORWARDED, *self._actions)}
        for line in sys.stdin:
            if line.strip() in numbers:
                self._requests.received.append(numbers[line.strip()])
        self._requests.received.append(END)

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
        while None in (codes := [rank.poll() for rank in self.ranks]):
            # The first failure is reported at once, so that the launcher ends the other nodes.
            if not is_reported and any(codes):
                is_reported = True
                self._end()
                self._report()
            # A connection that cannot send these lines notices that the launcher is gone.
            if time.monotonic() > next_look:
                next_look = time.monotonic() + REPORT_SECONDS
                report = watch.look() if self.job.hang_seconds else None
                _print_line(report or NodeReport(self.host))
            for number in self._requests.new():
                self._handle(number)
            self._end_in_time()
            time.sleep(POLL_SECONDS)
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
        failed = [
            rank
            for rank in self.ranks
            if rank.poll() and (self._ended_alone(rank) or rank.error_file.exists())
        ]
        for rank in failed:
            rank.read_to_end()
        first = first_failure(
            rank.failure(is_ended=not self._ended_alone(rank)) for rank in failed
        )
        if first is not None:
            _print_line(first, time.time())
        return first

    def _ended_alone(self, rank: RankProcess) -> bool:
        assert rank.ended is not None, f"rank {rank.number} runs"
        return rank.ended <= self._end_time

    def _end(self, grace: float | None = None) -> None:
        """Ask all ranks to stop. Those that still run after the grace period, of the job by default, are killed."""
        seconds = self.job.grace_seconds if grace is None else grace
        self._kill_time = min(self._kill_time, time.monotonic() + seconds)
        if self._end_time == math.inf:
            self._end_time = time.time()
            self._send(signal.SIGTERM)

    def _kill(self) -> None:
        """End ranks that hang. Those with a GPU first write their last collectives."""
        if self._record_end == math.inf:
            self._record_end = time.monotonic() + RECORD_SECONDS
            for rank in self.ranks:
                rank.ask_for_record()

    def _end_in_time(self) -> None:
        """End ranks that have written their records, or that nothing else would end; kill those whose time is over."""
        is_hang = self._record_end < math.inf
        answered = is_hang and all(rank.has_answered() for rank in self.ranks)
        # Ranks that hang save nothing more.
        if answered or time.monotonic() > self._record_end:
            self._end(LAST_SECONDS)
        elif self._end_time == math.inf and _reader_is_gone():
            self._end()
        if time.monotonic() > self._kill_time:
            self._send(signal.SIGKILL)

    def _print_stacks(self) -> None:
        for rank in self.ranks:
            rank.print_stacks()

    def _handle(self, number: int) -> None:
        """Do what a signal asks for; those of the user go to the ranks."""
        if number in self._actions:
            self._actions[number]()
        else:
            self._send(signal.SIGKILL if self._requests.are_urgent else number)

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


def _print_line(report: Failure | NodeReport, *arguments: float) -> None:
    """Print the line of a report. It is one write, so that nothing comes between."""
    write_out(f"{report.line(*arguments)}\n".encode())


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
