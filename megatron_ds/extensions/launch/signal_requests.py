"""`Requests`: the signals that this process receives for those that it has started."""

import signal
import time
from collections.abc import Sequence

from .child import POLL_SECONDS


class Requests:
    """received: the numbers of all signals so far. They are passed on by the loop that supervises, not by a handler,
    so none is lost before the processes have started."""

    def __init__(self):
        self.received: list[int] = []
        self._passed_on = 0

    def install(self, numbers: Sequence[int]) -> None:
        """Handle these signals from now on."""
        for number in numbers:
            signal.signal(number, lambda number, _: self.received.append(number))

    def new(self) -> list[int]:
        """Return those that have come since the last call."""
        found = self.received[self._passed_on :]
        self._passed_on += len(found)
        return found

    @property
    def are_urgent(self) -> bool:
        """Whether Ctrl-C was pressed twice."""
        return self.received.count(signal.SIGINT) > 1

    def pause(self, seconds: float) -> bool:
        """Wait; False if a signal has come, then or before."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self.received:
            time.sleep(POLL_SECONDS)
        return not self.received
