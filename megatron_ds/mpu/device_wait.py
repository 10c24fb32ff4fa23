"""`read_numbers`: numbers of a GPU on the host, by a wait that has an end.

Where the work before them includes a collective of NCCL for which another rank does not come, a plain read never
returns: NCCL's watchdog ends the process after the timeout, without a message that names the rank. Here the host
asks an event instead, and raises an error that names the rank before the watchdog acts. The watchdog counts from
the launch of a collective, the host from the end of its launches: the time between the two must be below the
margin.
"""

import time
from typing import Any

import torch

from ..host.places import WAITING
from .group import Group

SHARE = 0.1  # of the timeout that is left for the reports of the ranks, before the watchdog acts
FEWEST_SECONDS = 30.0  # of it
SPIN_SECONDS = (
    1.0  # in which the host asks without a pause, as the driver's own wait does
)
PAUSE_SECONDS = 0.001


def read_numbers(numbers: torch.Tensor, group: Group) -> list:
    """`numbers.tolist()`. group: ranks whose timeout limits the wait for a GPU, and whose error is raised.

    Raises CommunicationError, with the ranks that are stuck, if the GPU does not come to the numbers in time.
    """
    if not numbers.is_cuda or group.transport is None:
        return numbers.tolist()
    on_host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    on_host.copy_(numbers, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    seconds = patience(group.transport.wait_seconds)
    with WAITING:
        is_reached = _is_reached(event, seconds)
    if not is_reached:
        error = TimeoutError(
            f"the work of the device timed out: it was not complete after {seconds:g} s"
        )
        raise group.transport.failure("waiting for the device", error)
    return on_host.tolist()


def patience(timeout: float) -> float:
    """Seconds that the host waits for work whose collectives may take `timeout` seconds: less by a margin in
    which all ranks report."""
    margin = max(FEWEST_SECONDS, SHARE * timeout)
    return max(timeout - margin, timeout / 2)


def _is_reached(event: Any, seconds: float) -> bool:
    """Whether a GPU comes to the event within that time."""
    start = time.monotonic()
    while not event.query():
        waited = time.monotonic() - start
        if waited > seconds:
            return False
        time.sleep(0 if waited < SPIN_SECONDS else PAUSE_SECONDS)
    return True
