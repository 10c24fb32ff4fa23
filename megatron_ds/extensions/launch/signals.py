"""Signals on the way from the launcher to the ranks of another host.

ssh, srun and mpirun end by most signals instead of passing them on, but they pass their input on, by which agents get
the numbers of signals. pdsh does not. There each agent writes its process id into a file whose name the launcher
knows, and the launcher sends a signal by a second connection that reads the file.
"""

import contextlib
import ctypes
import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from ...host import places
from .job import Job

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
"""What the launcher and the agents pass on: programs save and stop, or do what their authors chose."""
END = signal.SIGHUP
"""An agent ends its ranks: SIGTERM, and after the job's grace period SIGKILL."""
STACKS = places.STACKS
"""An agent has its ranks print their stacks."""
KILL = signal.SIGABRT
"""An agent ends ranks that hang: their records of collectives, SIGTERM, and soon SIGKILL."""
RECORD_SECONDS = 6.0
"""In which ranks write their records. They look for the request each second."""
LAST_SECONDS = 1.0
"""From SIGTERM to SIGKILL of ranks that hang."""
PR_SET_PDEATHSIG = 1  # of Linux' prctl
OWN_NUMBER = "%n"
"""pdsh replaces it by the number of the host."""
START_SECONDS = 10
"""Within which an agent starts on its host."""


def pid_name(job: Job, node: int | str) -> str:
    """Return the name of the file of a node's agent, in the folder for temporary files. node: its number"""
    return f"megatron-ds-{job.name}-{node}.pid"


@contextlib.contextmanager
def pid_file(job: Job, host: str) -> Iterator[None]:
    """Write the id of this process to a file while the block runs. An existing file is an error."""
    path = Path(tempfile.gettempdir(), pid_name(job, job.hosts.index(host)))
    with path.open("x") as file:
        file.write(str(os.getpid()))
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def dying_with_parent(number: int) -> Callable[[], object] | None:
    """Return what a new process calls so that the kernel signals it when this one is gone; None if it cannot."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl  # found before the fork
    return lambda: prctl(PR_SET_PDEATHSIG, number)


def signal_text(job: Job, number: int) -> str:
    """Return what a shell of pdsh runs to signal the agent of its host; without an agent it does nothing.

    For a signal of the user it waits for an agent that is about to start.
    """
    name = signal.Signals(number).name.removeprefix("SIG")
    path = f'"${{TMPDIR:-/tmp}}/{pid_name(job, OWN_NUMBER)}"'
    seconds = " ".join(map(str, range(START_SECONDS if number in FORWARDED else 0)))
    wait = f"for i in {seconds}; do test -f {path} || sleep 1; done"
    return f"sh -c {shlex.quote(f'{wait}; test ! -f {path} || kill -s {name} $(cat {path})')}"
