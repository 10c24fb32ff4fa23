"""Signals that request a stop: SIGTERM, SIGUSR1 and the first Ctrl-C. A second Ctrl-C ends the command at
once.

    start-up, one rank         raises `Stopped` at once: nothing is unsaved and no other rank waits
    start-up, several ranks    is recorded; ranks agree on it at the next step of the start-up
    training and evaluation    is recorded; ranks agree on it in the all-reduce of each step, so all of them
                               stop after the same step. A signal to one rank is enough
    after the last save        is ignored: the exit code must not report a failure
"""

import signal
from types import FrameType

GRACEFUL = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class Stopped(BaseException):
    """A signal requested a stop before training began.

    Derives from BaseException, as KeyboardInterrupt does, so that no `except Exception` handles it.
    """


class StopRequest:
    """Context manager that handles the three signals; works in the main thread only.

    received   name of the first signal that arrived, or None
    """

    def __init__(self):
        self.received: str | None = None
        self._is_deferred = False
        self._previous: dict = {}

    def install(self) -> None:
        """Handle the signals. A signal that an outer request has received counts for this one, too."""
        for number in GRACEFUL:
            self._previous[number] = outer = signal.signal(number, self._handle)
            self.received = self.received or getattr(getattr(outer, "__self__", None), "received", None)

    def __enter__(self) -> "StopRequest":
        self.install()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def defer(self) -> None:
        """From now on a signal sets `received` and raises nothing."""
        self._is_deferred = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or signal.Signals(number).name
        if number == signal.SIGINT:      # the next Ctrl-C is not handled here
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if not self._is_deferred:
            raise Stopped(before_training(self.received))


def before_training(signal_name: str) -> str:
    """The last line of a command that was stopped during start-up."""
    return f"stopped by {signal_name} before the first step: there is nothing to save"


def ignore_stop_signals() -> None:
    """Ignore the signals from now on: the exit code is known, and the interpreter takes a moment to exit."""
    for number in GRACEFUL:
        signal.signal(number, signal.SIG_IGN)
