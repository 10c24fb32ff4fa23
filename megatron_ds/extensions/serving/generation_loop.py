"""`GenerationLoop`: one thread that owns the generator, and the requests that the event loop of a server gives it.

    tasks of the event loop                     the thread of `run`
    with loop.submit(requests) as job     →     generator.add, step, step, …
    async for index, token in job.tokens()  ←   a token of each running request
    the end of the block                  →     generator.cancel

A client that reads slowly never delays a step: tokens wait in a queue of its job, which is no longer than the
requested text. A request for which the model has no token ends with an error of its own; an error of the generator
ends the loop, and every job has it.
"""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence

from ...errors import CallError, ConfigError
from ..generation.generator import Generator
from ..generation.requests import GeneratedToken, GenerationRequest
from .refused_request import BROKEN, BUSY, RefusedRequest, closing

POLL_SECONDS = 0.2  # between two looks at a stop request
IDLE_SECONDS = (
    30.0  # between two steps without requests, so that other ranks do not time out
)
SHUTTING_DOWN = "the server is shutting down."
# A token of a request, an error of all, or the end of the client.
Event = tuple[int, GeneratedToken] | RefusedRequest | None


class TextJob:
    """The requests of one client. Used by one task of an event loop, and closed at the end.

    prompt_scores  of each request that asks for them, complete before its first token comes
    """

    def __init__(self, loop: "GenerationLoop", requests: Sequence[GenerationRequest]):
        self.requests = tuple(requests)
        self.prompt_scores: dict[int, list] = {}
        self._loop = loop
        self._open = set(range(len(requests)))
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._tasks = asyncio.get_running_loop()

    def __enter__(self) -> "TextJob":
        return self

    def __exit__(self, *error: object) -> None:
        for index in sorted(self._open):
            self.cancel(index)

    async def tokens(self) -> AsyncIterator[tuple[int, GeneratedToken]]:
        """Yield (number of the request, token) as they come, until all requests are complete or the client has left.

        Raises RefusedRequest where the generator fails.
        """
        while self._open:
            event = await self._events.get()
            if event is None:
                return
            if isinstance(event, RefusedRequest):
                raise event
            index, token = event
            if index not in self._open:  # cancelled while this token was on its way
                continue
            if token.finish is not None:
                self._open.discard(index)
            yield index, token

    def leave(self) -> None:
        """End `tokens`, since the client has left."""
        self._events.put_nowait(None)

    def put(self, event: Event) -> None:
        """Give `tokens` an event; called by the thread that generates."""
        self._tasks.call_soon_threadsafe(self._events.put_nowait, event)

    def cancel(self, index: int) -> None:
        """End a request; it yields no further token."""
        if index in self._open:
            self._open.discard(index)
            self._loop.cancel(self, index)


class GenerationLoop:
    """most: requests that may be unfinished at a time; more are refused.

    is_stopping: whether a stop is requested. Then no new request is taken, and the others are completed.
    """

    def __init__(
        self, generator: Generator, most: int, is_stopping: Callable[[], bool]
    ):
        self._generator = generator
        self._most = most
        self._is_stopping = is_stopping
        self._changed = threading.Condition()
        # All of these are read and written under the lock.
        self._new: deque[tuple[TextJob, int]] = deque()
        self._cancelled: list[tuple[TextJob, int]] = []
        self._unfinished: set[tuple[TextJob, int]] = set()
        self._refusal: RefusedRequest | None = None
        # Requests by the numbers of the generator; used by the thread of `run` only.
        self._running: dict[int, tuple[TextJob, int]] = {}
        self._unscored: set[int] = (
            set()
        )  # requests without a token so far, whose prompt is to be scored

    def submit(self, requests: Sequence[GenerationRequest]) -> TextJob:
        """Start the requests. Raises RefusedRequest where there are too many, or the loop has ended."""
        job = TextJob(self, requests)
        parts = [(job, index) for index in range(len(requests))]
        self.require_open()
        with self._changed:
            if self._refusal is not None:
                raise self._refusal
            if len(self._unfinished) + len(parts) > self._most:
                raise self._too_many(len(parts))
            self._unfinished.update(parts)
            self._new.extend(parts)
            self._changed.notify()
        return job

    def require_open(self) -> None:
        """Raises RefusedRequest where requests are no longer taken."""
        with self._changed:
            if self._refusal is not None:
                raise self._refusal
        if self._is_stopping():
            raise closing(SHUTTING_DOWN)

    def _too_many(self, count: int) -> RefusedRequest:
        if count > self._most:
            return RefusedRequest(
                f"the request asks for {count} texts at once, and this server takes {self._most} (--max-requests). "
                "Ask for fewer."
            )
        return RefusedRequest(
            f"{len(self._unfinished)} texts are being generated or wait, and this server takes {self._most} at a "
            "time (--max-requests). Try again later.",
            status=BUSY,
            headers={"Retry-After": "1"},
        )

    def cancel(self, job: TextJob, index: int) -> None:
        """End one request of a job."""
        with self._changed:
            if (job, index) in self._unfinished:
                self._cancelled.append((job, index))
                self._changed.notify()

    def run(self) -> None:
        """Generate until a stop is requested and no request is left. Errors of the generator are raised, after all
        jobs have them."""
        try:
            while self._wait():
                self._drop_cancelled()
                self._add_new()
                for number, token in self._generator.step():
                    self._deliver(number, token)
            reason = closing(SHUTTING_DOWN)
        except BaseException as error:
            text = f"generation failed, and the server ends: {error or type(error).__name__}"
            reason = RefusedRequest(text, status=BROKEN, code="generation_failed")
            raise
        finally:
            self._refuse(reason)

    def _wait(self) -> bool:
        """Wait for work, at most IDLE_SECONDS; returns False once none is left after a stop request."""
        waited = 0.0
        with self._changed:
            while not self._unfinished:
                if self._is_stopping():
                    self._refusal = closing(SHUTTING_DOWN)
                    return False
                if waited >= IDLE_SECONDS:
                    break
                self._changed.wait(POLL_SECONDS)
                waited += POLL_SECONDS
        return True

    def _drop_cancelled(self) -> None:
        with self._changed:
            gone = set(self._cancelled)
            self._cancelled.clear()
            self._new = deque(part for part in self._new if part not in gone)
            self._unfinished -= gone
        for number, part in list(self._running.items()):
            if part in gone:
                del self._running[number]
                self._unscored.discard(number)
                self._generator.cancel(number)

    def _add_new(self) -> None:
        with self._changed:
            parts = list(self._new)
            self._new.clear()
        for job, index in parts:
            try:
                number = self._generator.add(job.requests[index])
            except ConfigError as error:  # this request alone is wrong
                job.put(RefusedRequest(str(error)))
                self._finish((job, index))
                continue
            self._running[number] = (job, index)
            if job.requests[index].scores_prompt:
                self._unscored.add(number)

    def _deliver(self, number: int, token: GeneratedToken | CallError) -> None:
        part = self._running.get(number)
        if part is None:
            return
        job, index = part
        if isinstance(token, CallError):  # of this request alone
            self._unscored.discard(number)
            del self._running[number]
            job.put(RefusedRequest(str(token), status=BROKEN, code="generation_failed"))
            self._finish(part)
            return
        if number in self._unscored:
            self._unscored.discard(number)
            job.prompt_scores[index] = self._generator.prompt_scores(number)
        job.put((index, token))
        if token.finish is not None:
            del self._running[number]
            self._finish(part)

    def _finish(self, part: tuple[TextJob, int]) -> None:
        with self._changed:
            self._unfinished.discard(part)

    def _refuse(self, reason: RefusedRequest) -> None:
        """Give all jobs the reason why no further token will come."""
        with self._changed:
            self._refusal = reason
            jobs = {job for job, _ in self._unfinished}
            self._unfinished.clear()
        for job in jobs:
            job.put(reason)
