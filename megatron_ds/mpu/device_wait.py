"""`wait_for_device`: a wait of the host for a GPU that has an end.

Where the work of the GPU includes a collective of NCCL for which another rank does not come, a plain wait never
returns: NCCL's watchdog ends the process after the timeout, without a message that names the rank. Here the host
asks an event instead, and raises an error that names the rank before the watchdog acts. The watchdog counts from
the launch of a collective, the host from the end of its launches: the time between the two must be below the
margin.

`host_reads.py` has the reads and waits that the package uses.
"""

import math
import time
from collections.abc import Callable
from typing import Protocol

SHARE = 0.1  # of the timeout that is left for the reports of the ranks, before the watchdog acts
FEWEST_SECONDS = 30.0  # of it
SPIN_SECONDS = 1.0  # without a pause between two questions, as in the driver's own wait
PAUSE_SECONDS = 0.001


class Failing(Protocol):
    """The part of a transport that a wait for the device needs."""

    @property
    def wait_seconds(self) -> float:
        """How long an operation may take."""

    def failure(self, what: str, error: Exception) -> Exception:
        """Return the error to raise."""


def wait_for_device(
    is_reached: Callable[[], bool],
    transport: Failing | None,
    spin_seconds: float = SPIN_SECONDS,
) -> None:
    """Return when the GPU comes to a point, which `event.query` answers for an event.

    transport: its timeout limits the wait; None: without other ranks the work of a GPU ends
    spin_seconds: in which the host asks without a pause

    Raises its failure, with the ranks that are stuck, if the GPU does not come there in time.
    """
    seconds = math.inf if transport is None else patience(transport.wait_seconds)
    if not _comes(is_reached, seconds, spin_seconds) and transport is not None:
        error = TimeoutError(
            f"the work of the device timed out: it was not complete after {seconds:g} s"
        )
        raise transport.failure("waiting for the device", error)


def patience(timeout: float) -> float:
    """Seconds that the host waits for work whose collectives may take `timeout` seconds: less by a margin in
    which all ranks report."""
    margin = max(FEWEST_SECONDS, SHARE * timeout)
    return max(timeout / 2, timeout - margin)


def _comes(is_reached: Callable[[], bool], seconds: float, spin_seconds: float) -> bool:
    """Return whether the GPU comes there within that time."""
    start = time.monotonic()
    while not is_reached():
        waited = time.monotonic() - start
        if waited > seconds:
            return False
        time.sleep(0 if waited < spin_seconds else PAUSE_SECONDS)
    return True
