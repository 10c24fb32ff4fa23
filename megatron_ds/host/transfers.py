"""`Then`: a transfer and the action that follows it."""

from collections.abc import Callable
from typing import Protocol


class Transfer(Protocol):
    """A transfer that has begun. It must be waited for: the error of one that is dropped is lost."""

    def wait(self) -> None:
        """Return when all bytes were transferred and the tensor may be used; a second call returns at once.

        Raises OSError with the bytes requested and transferred, also for a file that ends too early.
        """


class Then:
    """A transfer and an action that follows it. The first `wait` performs the action once."""

    __slots__ = ("_work", "_action")

    def __init__(self, work: Transfer, action: Callable[[], object]):
        self._work: Transfer | None = work
        self._action: Callable[[], object] | None = action

    def wait(self) -> None:
        """Wait, then perform the action."""
        if self._work is not None and self._action is not None:
            self._work.wait()
            self._action()
            self._work = self._action = None
