"""`Pace`: a thread that works beside a computation takes a small share of the processors."""

import threading
import time


class Pace:
    """Pauses that keep the thread which calls `pause` at a share of one processor.

    share    of one processor's time; 1 for no pauses
    """

    def __init__(self, share: float = 1.0):
        self._share = share
        self._used: float | None = None
        self._hurried = threading.Event()

    def pause(self) -> None:
        """Sleep as long as the processor time since the last call asks for; not behind `hurry`."""
        used = time.thread_time()
        if self._used is not None:
            self._hurried.wait((used - self._used) * (1 / self._share - 1))
        self._used = time.thread_time()

    def hurry(self) -> None:
        """End the pause and all later ones: something waits for the thread. Called by another thread."""
        self._hurried.set()
