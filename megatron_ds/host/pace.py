"""`Pace`: a thread that works beside a computation takes a small share of the processors."""

import threading
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from ..errors import MegatronDSError

T = TypeVar("T")


class Pace:
    """Pauses that keep the thread which calls `pause` at a share of one processor.

    share    of one processor's time; 1 for no pauses
    """

    def __init__(self, share: float = 1.0):
        self._share = share
        self._used: float | None = None
        self._hurried = threading.Event()
        self._is_stopped = False

    def pause(self) -> None:
        """Sleep as long as the share asks for after the processor time since the last call; not at all after
        `hurry`. Raises MegatronDSError after `stop`."""
        used = time.thread_time()
        if self._used is not None:
            self._hurried.wait((used - self._used) * (1 / self._share - 1))
        self._check()
        self._used = time.thread_time()

    def checked(self, parts: Iterable[T]) -> Iterator[T]:
        """Yield the parts of the work without pauses. Raises MegatronDSError after `stop`."""
        for part in parts:
            self._check()
            yield part

    def hurry(self) -> None:
        """End the pause and all later ones, because something waits for the thread. Called by another thread."""
        self._hurried.set()

    def stop(self) -> None:
        """End the work, because the process ends. Called by another thread."""
        self._is_stopped = True
        self.hurry()

    def _check(self) -> None:
        if self._is_stopped:
            raise MegatronDSError("the process ends before its thread has ended")
