"""SIGTERM, SIGUSR1 and the first Ctrl-C ask training to save and leave; a second Ctrl-C ends it at once.

The handler only sets a flag. Ranks agree on it in the reduction that every step makes anyway, so all stop after the same
step, also inside evaluation; a signal sent to any one rank is enough.
"""

import logging
import signal

logger = logging.getLogger(__name__)
GRACEFUL = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class StopRequest:
    """Context manager; `received` names the first signal that came, or is None."""

    def __init__(self):
        self.received: str | None = None
        self._previous: dict = {}

    def __enter__(self) -> "StopRequest":
        for number in GRACEFUL:
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame) -> None:
        self.received = self.received or signal.Signals(number).name
        if number == signal.SIGINT:      # the next Ctrl-C is not caught
            signal.signal(signal.SIGINT, signal.default_int_handler)
