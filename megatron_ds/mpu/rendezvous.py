"""`meet`: start torch.distributed on all ranks, or fail on all of them, at once or by one deadline.

torch's own start-up has several waits, each with the whole timeout, and one without an end: for the answer
of the process that listens at the address of rank 0. If that process dies, torch tries again and prints C++
stack frames. Here

    this thread      connects, then watches the connection and the clock
    another thread   makes torch's store and process group

The connection stays open until the ranks have met. torch's store never sends first: if data arrives, another
program listens there; if the connection closes, rank 0 (or torchrun's agent) has ended.

Before they make the process group, ranks compare their world sizes and numbers in the store (`Attendance`). A
rank that ends earlier, by an error of its options for instance, calls `report_absence`, and all others end
with its error. Rank 0 has the store; it stays until the others have read the error, or LISTEN_SECONDS.
"""

import logging
import os
import platform
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..errors import CommunicationError
from ..host.backend_log import only_errors
from ..host.torch_thread import torch_thread
from ..launch_env import unresolved
from .attendance import Attendance, Member

logger = logging.getLogger(__name__)
SLACK_SECONDS = 2.0  # after the deadline, in which torch's own error may arrive
PAUSE_SECONDS = 0.05  # between two looks
LISTEN_SECONDS = 15.0  # in which other ranks can read why this one has ended
HANDSHAKE_SECONDS = 5.0  # for the store of another process at the port of rank 0


class Place(NamedTuple):
    """Where a process meets the others, and the number with which it comes.

    address   host and port of rank 0
    file      path of a file that is the store instead, "" if there is none
    """

    address: tuple[str, int]
    rank: int
    world_size: int
    file: str = ""

    @property
    def is_kept(self) -> bool:
        """Whether the store is not rank 0's: torchrun's agent has it, or it is a file."""
        return bool(self.file) or _is_agents_store()

    @property
    def is_listener(self) -> bool:
        """Whether this process has the store."""
        return self.rank == 0 and not self.is_kept

    def attendance(self, store: dist.Store) -> Attendance:
        """This process in the store."""
        keys = f"attendance {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        member = Member(self.rank, self.world_size, platform.node(), os.getpid())
        return Attendance(dist.PrefixStore(keys, store), member, self.is_kept)

    def wait_for_listener(self, deadline: float) -> socket.socket | None:
        """Return a connection to the process that has the store; None on that process, and for a file."""
        if self.is_listener or self.file:
            return None
        return wait_for_listener(*self.address, deadline)


def meet(backend: str, place: Place, timeout: timedelta) -> None:
    """Make the process group. Collective over all ranks.

    Raises CommunicationError when the ranks cannot meet or have not come by the deadline, `timeout` from
    now; OSError, RuntimeError or ValueError when there is no store, or the process that has it ends.
    """
    # Rank 0 listens; the others wait until it does. A name may become known meanwhile.
    deadline = time.monotonic() + timeout.total_seconds()
    if not place.file and (problem := unresolved(place.address[0])):
        seconds = timeout.total_seconds()
        logger.warning(
            "%s: rank %d tries again for %.0f s", problem, place.rank, seconds
        )
    listener = place.wait_for_listener(deadline)
    device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def start() -> None:
        if device is not None:  # each thread of a process has its own
            torch.cuda.set_device(device)
        attendance = place.attendance(_open_store(place, timeout))
        try:
            group_store = attendance.arrive(deadline)
        except CommunicationError:
            if place.is_listener:
                _keep_for_others(attendance)
            raise
        dist.init_process_group(
            backend,
            store=group_store,
            rank=place.rank,
            world_size=place.world_size,
            timeout=timeout,
        )

    # The meeting runs in a thread: here the listener and the deadline are watched.
    with only_errors(), listener or nullcontext():
        attempt = _Attempt(start)
        while not attempt.is_over.wait(PAUSE_SECONDS):
            if listener is not None and (trouble := _problem_of(listener)):
                attempt.is_over.wait(SLACK_SECONDS)
                attempt.raise_error()
                raise OSError(trouble)
            if time.monotonic() > deadline + SLACK_SECONDS:
                raise OSError(
                    "a process listens there, but the ranks have not met by the deadline: other "
                    "ranks did not start, or another program listens there and does not answer"
                )
        attempt.raise_error()


def report_absence(place: Place, error: str) -> None:
    """Make `error`, one line, the error of the other ranks of the job: this one ends before it meets them.

    Returns at once. The report is made in a thread for which the exit of the process waits, at most
    LISTEN_SECONDS: until rank 0 listens, or, on rank 0, until all others have ended.
    """

    def report() -> None:
        deadline = time.monotonic() + LISTEN_SECONDS
        # Without a store there are no others to read it. The error itself has been raised.
        with suppress(OSError, RuntimeError, CommunicationError), only_errors():
            with place.wait_for_listener(deadline) or nullcontext():
                pass
            limit = timedelta(seconds=HANDSHAKE_SECONDS)
            store = _Attempt(lambda: _connect(place, place.is_listener, limit)).result(
                HANDSHAKE_SECONDS
            )
            attendance = place.attendance(store)
            attendance.leave_word(error)
            if place.is_listener:
                _listen(attendance, deadline)

    threading.Thread(target=report, name="report of absence").start()


def _open_store(place: Place, timeout: timedelta) -> dist.Store:
    """torch's store at the address: its server on rank 0, else a client."""
    try:
        return _connect(place, place.is_listener, timeout)
    except dist.DistNetworkError:
        if not place.is_listener:
            raise
        # The port is taken. If another rank 0 has it, both must know.
        other = _Attempt(lambda: _connect(place, False, timeout))
        with suppress(OSError, RuntimeError):
            store = other.result(HANDSHAKE_SECONDS)
            if place.attendance(store).has_begun(HANDSHAKE_SECONDS):
                return store
        raise


def _connect(place: Place, is_server: bool, timeout: timedelta) -> dist.Store:
    if place.file:
        return dist.FileStore(place.file, place.world_size)
    host, port = place.address
    return dist.TCPStore(
        host,
        port,
        is_master=is_server,
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=True,
    )


def _keep_for_others(attendance: Attendance) -> None:
    """Keep the store until the others have read the error: the exit of the process waits for this thread."""
    deadline = time.monotonic() + LISTEN_SECONDS

    def keep() -> None:
        with suppress(RuntimeError):
            _listen(attendance, deadline)

    threading.Thread(target=keep, name="report of absence").start()


def _listen(attendance: Attendance, deadline: float) -> None:
    while not attendance.is_informed() and time.monotonic() < deadline:
        time.sleep(PAUSE_SECONDS)


def _is_agents_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def wait_for_listener(host: str, port: int, deadline: float) -> socket.socket:
    """Return a connection to rank 0 (or torchrun's agent), once it listens. Raises the last OSError at `deadline`."""
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

    def __init__(self, call: Callable[[], Any]):
        self.is_over = threading.Event()
        self._call = call
        self._error: Exception | None = None
        self._result: Any = None
        self._thread = torch_thread(self._run, "rendezvous")

    def raise_error(self) -> None:
        """Raise what the call raised, if it has ended."""
        if self.is_over.is_set():
            self._thread.join()
        if self._error is not None:
            raise self._error

    def result(self, seconds: float) -> Any:
        """Return what the call returned. Raises its error, or OSError if it takes longer than `seconds`."""
        if not self.is_over.wait(seconds):
            raise OSError(f"no answer within {seconds:g} s")
        self.raise_error()
        return self._result

    def _run(self) -> None:
        try:
            self._result = self._call()
        except Exception as error:  # raised in the thread that waits
            self._error = error
        self.is_over.set()


def _problem_of(listener: socket.socket) -> str | None:
    """Return why the process at the other end is not, or no longer, torch's store."""
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
