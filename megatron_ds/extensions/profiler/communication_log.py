"""`CommunicationLog`: how often, how much and how long a rank communicates, by operation, group and message size.

`Traffic.log` of the groups of a mesh is None, which costs nothing, or the one log of them all. Collectives of tensors
and the sends of a pipeline are in it; an engine adds the objects that a program exchanges. A barrier has no payload,
and a receive is in the log of its sender: its own time is mostly a wait.

Note: what a time is. Every time includes the wait for ranks that come later. On CPUs the clock is that of the host. A
collective whose caller waits for it at once takes until the wait returns. One that runs in the background takes until
the caller finds it complete, in `wait` or `is_completed`: gloo does not report when that was, so the time includes
what the caller computed meanwhile, and the bandwidth is a lower bound. On a GPU a wait only orders the stream, so the
times are those of events on it, from the call to the end of the wait, with what the stream computed meanwhile. They
are read when later calls find them complete: the host waits for no event before `complete_rows`.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ...mpu.group import RING_FACTOR, Group, Work
from ...mpu.host_reads import wait_until

logger = logging.getLogger(__name__)


class LoggedMessage(NamedTuple):
    """Calls with equal values are one row of the log.

    first      global rank of the first rank of the group, which distinguishes groups over the same axes
    num_bytes  payload of one call, as `Traffic` counts it
    """

    operation: str
    axes: str
    size: int
    first: int
    num_bytes: int


@dataclass
class Spent:
    """Complete calls of one sort of message, and the seconds they took together."""

    calls: int = 0
    seconds: float = 0.0


def algorithmic_bandwidth(message: LoggedMessage, spent: Spent) -> float:
    """Payload by time, bytes per second; 0 without a time."""
    if not spent.seconds:
        return 0.0
    return message.num_bytes * spent.calls / spent.seconds


def bus_bandwidth(message: LoggedMessage, spent: Spent) -> float:
    """Return what one rank of a ring sends by time, bytes per second: comparable to the speed of a link."""
    factor = RING_FACTOR[message.operation](message.size)
    return factor * algorithmic_bandwidth(message, spent)


class HostClock:
    """Seconds of this process."""

    def __init__(self, now: Callable[[], float] = time.perf_counter):
        self.now = now

    def elapsed(self, start: float, end: float, wait: bool) -> float:
        """Return the seconds between."""
        return end - start


class StreamClock:
    """Events on the current stream of a GPU."""

    def now(self) -> torch.cuda.Event:
        """Return an event that the stream has not reached yet."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def elapsed(
        self, start: torch.cuda.Event, end: torch.cuda.Event, wait: bool
    ) -> float | None:
        """Return the seconds between; None while the stream has not reached the end, unless the host is to wait."""
        if wait:
            wait_until(end.query)
        elif not end.query():
            return None
        return start.elapsed_time(end) / 1e3


class CommunicationLog:
    """The log of one rank.

    operations  the names of those that are recorded; None: all
    is_verbose  whether each call is logged when it is complete
    rows        calls whose times are known
    """

    def __init__(
        self,
        operations: Collection[str] | None = None,
        is_verbose: bool = False,
        clock: HostClock | StreamClock | None = None,
    ):
        self.rows: dict[LoggedMessage, Spent] = {}
        self._operations = operations
        self._is_verbose = is_verbose
        self._clock = clock or HostClock()
        self._unread: deque[tuple[LoggedMessage, Any, Any]] = deque()

    def start(
        self, operation: str, group: Group, num_bytes: int, begin: Callable[[], Work]
    ) -> Work:
        """`begin()`, whose work is recorded when it is found complete."""
        first = group.ranks[0]
        message = LoggedMessage(operation, group.axes, group.size, first, num_bytes)
        return self.record(message, begin)

    def record(self, message: LoggedMessage, begin: Callable[[], Work]) -> Work:
        """`start`, for a message that no `Group` describes."""
        if not self._records(message):
            return begin()
        started = self.now()
        return _Logged(begin(), lambda: self._end(message, started))

    def now(self) -> Any:
        """Return a time of the clock, for `add`."""
        return self._clock.now()

    def add(self, message: LoggedMessage, started: Any) -> None:
        """Record a call that began at `started` and is complete, of which the bytes are known only now."""
        if self._records(message):
            self._end(message, started)

    def complete_rows(self) -> dict[LoggedMessage, Spent]:
        """`rows` with all calls that were found complete. The host waits for the device."""
        self._read(wait=True)
        return self.rows

    def _records(self, message: LoggedMessage) -> bool:
        return self._operations is None or message.operation in self._operations

    def _end(self, message: LoggedMessage, started: Any) -> None:
        self._unread.append((message, started, self.now()))
        self._read(wait=False)

    def _read(self, wait: bool) -> None:
        """Add the calls whose times are known, the oldest first."""
        while self._unread:
            message, started, ended = self._unread[0]
            seconds = self._clock.elapsed(started, ended, wait)
            if seconds is None:
                return
            self._unread.popleft()
            self._add(message, seconds)

    def _add(self, message: LoggedMessage, seconds: float) -> None:
        spent = self.rows.setdefault(message, Spent())
        spent.calls += 1
        spent.seconds += seconds
        if self._is_verbose:
            logger.info(
                "%s over %s of %d ranks: %d bytes, %.3f ms",
                message.operation,
                message.axes,
                message.size,
                message.num_bytes,
                seconds * 1e3,
            )


class _Logged:
    """A `Work` that calls a function once, when it is found complete."""

    __slots__ = ("_record", "_work")

    def __init__(self, work: Work, record: Callable[[], None]):
        self._work = work
        self._record: Callable[[], None] | None = record

    def wait(self, *timeout: Any) -> Any:
        result = self._work.wait(*timeout)
        self._complete()
        return result

    def is_completed(self) -> bool:
        is_completed = self._work.is_completed()
        if is_completed:
            self._complete()
        return is_completed

    def __getattr__(self, name: str) -> Any:
        """Return what torch's work has besides."""
        return getattr(self._work, name)

    def _complete(self) -> None:
        record = self._record
        self._record = None
        if record is not None:
            record()
