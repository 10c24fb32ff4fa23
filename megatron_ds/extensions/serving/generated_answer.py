"""`GeneratedAnswer`: an answer whose texts are being generated. It ends with its client."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from starlette.concurrency import run_in_threadpool
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from .connection import STREAMS
from .generation_loop import GenerationLoop, TextJob
from .openai_reply import OpenAIReply, ReplyPart
from .refused_request import RefusedRequest
from .served_text import ServedText

SHORT = 1000  # tokens; log-probabilities of more would stop the event loop for long
JSON_TYPE = "application/json"
STREAM_HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-store"}


def json_answer(
    content: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Return an answer of one JSON value, and an end of line for terminals."""
    return Response(json.dumps(content) + "\n", status, headers, JSON_TYPE)


class Reply(Protocol):
    """A request that has been read. One that `streams` is an `OpenAIReply`."""

    @property
    def parts(self) -> Sequence[ReplyPart]: ...
    @property
    def streams(self) -> bool: ...

    def whole(self) -> dict[str, Any]:
        """Return the answer, once all texts are complete."""


class GeneratedAnswer:
    """An ASGI application that generates the texts of a reply, and sends them whole or as they come."""

    def __init__(self, reply: Reply, loop: GenerationLoop):
        self._reply = reply
        self._loop = loop

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer. Raises RefusedRequest before an answer has begun."""
        # The room of a job is that of its prompts and of all it may generate.
        reply = self._reply
        requests = [part.request for part in reply.parts]
        size = sum(len(one.tokens) + one.max_new_tokens for one in requests)
        with self._loop.submit(requests) as job:
            watch = asyncio.create_task(_leave(receive, job))
            grown = grow(job, [part.text for part in reply.parts])
            # A stream sends parts as they grow; others wait for the whole.
            try:
                if isinstance(reply, OpenAIReply) and reply.streams:
                    scope[STREAMS] = True
                    events = _events(reply, grown)
                    stream = StreamingResponse(events, headers=STREAM_HEADERS)
                    await stream.stream_response(send)
                    return
                async for _ in grown:
                    pass
                work = partial(_whole, reply)
                answer = work() if size < SHORT else await run_in_threadpool(work)
                await answer(scope, receive, send)
            finally:
                watch.cancel()


def _whole(reply: Reply) -> Response:
    return json_answer(reply.whole())


async def _leave(receive: Receive, job: TextJob) -> None:
    """End a job when its client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass
    job.leave()


async def grow(job: TextJob, texts: Sequence[ServedText]) -> AsyncIterator[int]:
    """Add the tokens of a job to its texts. Yield the number of a text after each of its tokens.

    Ends when all texts are complete, or the client has left. Raises RefusedRequest.
    """
    async for index, token in job.tokens():
        text = texts[index]
        if index in job.prompt_scores:
            # A long prompt takes long.
            scores = job.prompt_scores.pop(index)
            await run_in_threadpool(text.add_prompt, scores)
        text.add(token)
        if text.finish is not None:
            job.cancel(index)
        yield index


async def _events(
    reply: OpenAIReply, grown: AsyncIterator[int]
) -> AsyncIterator[bytes]:
    """Yield server-sent events of one JSON object each. After the first one an error is an event, too."""
    try:
        for chunk in reply.opening():
            yield _event(chunk)
        async for index in grown:
            for chunk in reply.chunk(index):
                yield _event(chunk)
        for chunk in reply.ending():
            yield _event(chunk)
    except RefusedRequest as refusal:
        yield _event(refusal.as_json())
    yield b"data: [DONE]\n\n"


def _event(content: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"
