"""`LateRequests`: the requests of one job to a store, of which one meets with a drawn fate.

fails     it does not arrive, and its sender has an error
lost      it arrives, and its answer does not
before    its sender is suspended before it, while another job takes over; then it is sent
late      its sender has an error and is suspended; it arrives while the other job saves
twice     it arrives, its sender is suspended, and it arrives again while the other job saves
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from megatron_ds.extensions.stores import store_objects

FATES = ("fails", "lost", "before", "late", "twice")
CHANGES = ("pipe_file", "rm", "rm_file")


class LateRequests:
    """Intercepts the changes of a store.

    number      of the request that meets with the fate
    arrival     number of the other job's requests before which a late one arrives
    other_job   runs from its start to its end; without a fate the requests are counted
    """

    def __init__(
        self,
        store: Any,
        fate: str = "",
        number: int = -1,
        arrival: int = 0,
        other_job: Callable[[], None] = lambda: None,
    ):
        self.sent = 0  # requests of the first job
        self.other_job_ran = False
        self._store = store
        self._fate = fate
        self._number = number
        self._arrival = arrival
        self._other_job = other_job
        self._late: Callable | None = None
        self._is_inside = False  # a request may consist of others
        self._is_of_other_job = False

    @contextmanager
    def intercepted(self) -> Iterator[None]:
        """Inside, the requests of this process are those of the two jobs."""
        conditions = store_objects.conditions_of(self._store)
        protocol = self._store.protocol
        name = protocol if isinstance(protocol, str) else protocol[0]
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(
                store_objects.CONDITIONS, name, _Intercepted(self, conditions)
            )
            for change in CHANGES:
                patch.setattr(
                    self._store, change, self._sent_by(getattr(self._store, change))
                )
            opened = self._store.open
            to_write = self._sent_by(opened)
            patch.setattr(
                self._store,
                "open",
                lambda path, mode="rb", **options: (
                    opened if "r" in mode else to_write
                )(path, mode, **options),
            )
            yield
            self._arrive()

    def _sent_by(self, method: Callable) -> Callable:
        return lambda *values, **options: self.send(lambda: method(*values, **options))

    def send(self, request: Callable) -> Any:
        """What the request returns, unless it has a fate."""
        if self._is_inside:
            return request()
        if self._is_of_other_job:
            return self._send_of_other_job(request)
        self.sent += 1
        if self.sent - 1 == self._number:
            return self._suffer(request)
        return self._run(request)

    def _run(self, request: Callable) -> Any:
        self._is_inside = True
        try:
            return request()
        finally:
            self._is_inside = False

    def _send_of_other_job(self, request: Callable) -> Any:
        if self._arrival == 0:
            self._arrive()
        self._arrival -= 1
        return self._run(request)

    def _suffer(self, request: Callable) -> Any:
        error = ConnectionError("the connection was reset")
        if self._fate == "fails":
            raise error
        if self._fate == "lost":
            self._run(request)
            raise error
        answer = self._run(request) if self._fate == "twice" else None
        if self._fate != "before":
            self._late = request
        self._is_of_other_job = True
        self._other_job()
        self._is_of_other_job = False
        self.other_job_ran = True
        self._arrive()
        if self._fate == "late":
            raise error
        return self._run(request) if self._fate == "before" else answer

    def _arrive(self) -> None:
        late, self._late = self._late, None
        if late is not None:
            with suppress(Exception):  # its sender does not wait for an answer
                self._run(late)


class _Intercepted:
    """`store_objects.Conditions` whose requests are those of `LateRequests`."""

    def __init__(self, requests: LateRequests, conditions: Any):
        self.version = conditions.version
        self._requests = requests
        self._conditions = conditions

    def replace(self, path, content: bytes, version: str) -> None:
        self._requests.send(lambda: self._conditions.replace(path, content, version))

    def remove(self, path, version: str) -> None:
        self._requests.send(lambda: self._conditions.remove(path, version))


def drawn(draw: random.Random, requests: int) -> dict[str, Any]:
    """Values of `LateRequests` for a job that sends so many requests, the first of which acquires the lock.

    The first one has no fate: a job whose lock is created after the other job has ended is its successor.
    """
    return {
        "fate": draw.choice(FATES),
        "number": draw.randrange(1, requests),
        "arrival": draw.randrange(40),
    }
