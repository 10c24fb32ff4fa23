"""Signals that ask a command to stop: SIGTERM, SIGUSR1 and the first Ctrl-C. A second Ctrl-C ends the command
at once.

    start-up, one rank alone      the signal raises `Stopped` at once: nothing is unsaved and no other rank waits
    start-up, several ranks       the signal is noted; ranks agree on it at the next step of the start-up
    training and evaluation       the signal is noted; ranks agree on it in the reduction that each step makes anyway, so all
                                  of them stop after the same step. A signal sent to any one rank is enough
    after the last save           ignored: the work is done, and a queue must not see a failure
"""

import signal
from types import FrameType

GRACEFUL = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class Stopped(BaseException):
    """A signal asked to stop before training began. Derives from BaseException, as KeyboardInterrupt does, so
    that no `except Exception` on the way handles it."""


class StopRequest:
    """Context manager that handles the three signals; works in the main thread only.

    received   name of the first signal that arrived, or None
    """

    def __init__(self):
        self.received: str | None = None
        self._is_deferred = False
        self._previous: dict = {}

    def install(self) -> None:
        """Handle the signals; what an outer request has received already counts for this one, too."""
        for number in GRACEFUL:
            self._previous[number] = outer = signal.signal(number, self._handle)
            self.received = self.received or getattr(getattr(outer, "__self__", None), "received", None)

    def __enter__(self) -> "StopRequest":
        self.install()
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def defer(self) -> None:
        """From here on a signal is noted in `received` and raises nothing."""
        self._is_deferred = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or signal.Signals(number).name
        if number == signal.SIGINT:      # the next Ctrl-C is not handled here
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if not self._is_deferred:
            raise Stopped(before_training(self.received))


def before_training(signal_name: str) -> str:
    """The line that a command ends with when it was stopped during start-up."""
    return f"stopped by {signal_name} before the first step: there is nothing to save"


def ignore_stop_signals() -> None:
    """For the rest of this process, once its exit code is known: the interpreter still takes a moment to end.
    """
    for number in GRACEFUL:
        signal.signal(number, signal.SIG_IGN)
