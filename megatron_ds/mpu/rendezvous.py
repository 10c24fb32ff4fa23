"""`meet`: start torch.distributed on all ranks, or fail on all of them by one deadline.

torch's own start-up has several waits, each with the whole timeout, and one without an end: for the answer
of the process that listens at the address of rank 0. If that process dies, torch tries again and prints C++
stack frames. Here

    this thread      connects, then watches the connection and the clock
    another thread   makes torch's store and process group

The connection stays open until the ranks have met. torch's store never sends first: if data arrives, another
program listens there; if the connection closes, rank 0 (or torchrun's agent) has ended.
"""

import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist

from ..host.backend_log import only_errors

SLACK_SECONDS = 2.0  # after the deadline, in which torch's own error may arrive
PAUSE_SECONDS = 0.05  # between two looks


def meet(
    backend: str,
    address: tuple[str, int],
    rank: int,
    world_size: int,
    timeout: timedelta,
) -> None:
    """Make the process group. Collective over all ranks.

    Raises OSError, RuntimeError or ValueError when the others have not come by the deadline, `timeout` from
    now, or when the process that listens has ended.
    """
    # Rank 0 listens; the others wait until it does.
    deadline = time.monotonic() + timeout.total_seconds()
    listener = wait_for_listener(*address, deadline) if rank > 0 else None
    device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def start() -> None:
        if device is not None:  # each thread of a process has its own
            torch.cuda.set_device(device)
        host, port = address
        dist.init_process_group(
            backend,
            init_method=f"tcp://{host}:{port}",
            rank=rank,
            world_size=world_size,
            timeout=timeout,
        )

    # The meeting runs in a thread: here the listener and the deadline are watched.
    with only_errors(), listener or nullcontext():
        attempt = _Attempt(start)
        while not attempt.is_over.wait(PAUSE_SECONDS):
            if listener is not None and (problem := _problem_of(listener)):
                attempt.is_over.wait(SLACK_SECONDS)
                raise OSError(problem)
            if time.monotonic() > deadline + SLACK_SECONDS:
                raise OSError(
                    "a process listens there, but the ranks have not met by the deadline: other "
                    "ranks did not start, or another program listens there and does not answer"
                )
        attempt.raise_error()


def wait_for_listener(host: str, port: int, deadline: float) -> socket.socket:
    """A connection to rank 0 (or torchrun's agent), once it listens. Raises the last OSError at `deadline`."""
    pause = PAUSE_SECONDS
    while True:
        try:
            found = socket.create_connection(
                (host, port), timeout=max(1.0, deadline - time.monotonic())
            )
            if found.getsockname() != found.getpeername():
                return found
            # The kernel chose this port for the socket itself, which is now connected to itself. Reset it:
            # rank 0 could not listen there while it is open, nor for a minute after an ordinary end.
            found.setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
            )
            found.close()
        except OSError as error:
            if time.monotonic() > deadline:
                raise OSError(
                    f"no process listens there ({error.strerror or error}): rank 0 did not start "
                    "or has exited"
                ) from error
        time.sleep(max(0.0, min(pause, deadline - time.monotonic())))
        pause = min(1.0, 1.5 * pause)


class _Attempt:
    """A call in a thread of its own, which ends with the process if it never returns.

    is_over   set when the call has returned or raised
    """

    def __init__(self, call: Callable[[], None]):
        self.is_over = threading.Event()
        self._call = call
        self._error = None
        threading.Thread(target=self._run, name="rendezvous", daemon=True).start()

    def raise_error(self) -> None:
        """Raise what the call raised."""
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._call()
        except Exception as error:  # raised in the thread that waits
            self._error = error
        self.is_over.set()


def _problem_of(listener: socket.socket) -> str | None:
    """Why the process at the other end is not, or no longer, torch's store."""
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    if not poll.poll(0):
        return None
    try:
        data = listener.recv(64)
    except OSError:
        data = b""
    if data:
        return f"another program listens there: it sends {data!r}, which torch's store does not"
    return "the process that listened there has ended or closed the connection: rank 0, or torchrun's agent"
