"""The application of starlette: which function answers which path, and how a request is refused."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from http import HTTPMethod
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from .browser_rules import BrowserRules
from .chat_completions import chat_completions
from .completions import completions
from .generated_answer import GeneratedAnswer, Reply, json_answer
from .generation_loop import GenerationLoop
from .megatron_text import megatron_text
from .refused_request import ABSENT, BROKEN, RefusedRequest
from .request_body import SMALL_BODY, HeldBytes, body_of
from .request_fields import Values, read_json
from .served_model import ServedModel
from .try_page import page

UNKNOWN_METHOD = 501
SHORT_BODY = 4 << 10  # bytes, which are read in about a millisecond


@dataclass(frozen=True)
class Serving:
    """What answers requests: the model, the loop that generates, and what bounds large bodies."""

    model: ServedModel
    loop: GenerationLoop
    held: HeldBytes
    # Large bodies are read one at a time, so that they take the processor of one.
    large: asyncio.Lock = field(default_factory=asyncio.Lock)


# ------------------------------------------------------------------ endpoints
async def generated(
    read: Callable[[Values, ServedModel], Reply],
    at_once: int,
    serving: Serving,
    request: Request,
) -> GeneratedAnswer:
    """Read what has to be generated. at_once: bytes of a body that is read in the event loop, others in a thread.

    Raises RefusedRequest.
    """
    model = serving.model
    async with body_of(request, model.most_body, serving.held) as body:
        work = partial(_read, read, body, model)
        if len(body) <= at_once:
            reply = work()
        elif len(body) <= SMALL_BODY:
            reply = await run_in_threadpool(work)
        else:
            async with serving.large:
                reply = await run_in_threadpool(work)
    return GeneratedAnswer(reply, serving.loop)


def _read(
    read: Callable[[Values, ServedModel], Reply], body: bytes, model: ServedModel
) -> Reply:
    return read(read_json(body), model)


async def health(serving: Serving, request: Request) -> Response:
    """Raises RefusedRequest where a request would not be answered."""
    serving.loop.require_open()
    return json_answer({"status": "ok"})


async def models(serving: Serving, request: Request) -> Response:
    """Return the list of the one model."""
    return json_answer({"object": "list", "data": [_entry(serving.model)]})


async def one_model(serving: Serving, request: Request) -> Response:
    """Return the model that the path names. Raises RefusedRequest for another one."""
    serving.model.require_name(request.path_params["name"])
    return json_answer(_entry(serving.model))


async def try_page(serving: Serving, request: Request) -> Response:
    """Return the page for browsers."""
    return HTMLResponse(page(serving.model))


def _entry(model: ServedModel) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "megatron_ds",
        "max_model_len": model.max_length,
    }


ENDPOINTS: dict[tuple[str, str], Callable[..., Any]] = {
    ("POST", "/v1/completions"): partial(generated, completions, SHORT_BODY),
    ("POST", "/completions"): partial(generated, completions, SHORT_BODY),
    ("POST", "/v1/chat/completions"): partial(
        generated, chat_completions, 0
    ),  # templates may take long
    ("PUT", "/api"): partial(generated, megatron_text, SHORT_BODY),
    ("GET", "/"): try_page,
    ("GET", "/health"): health,
    ("GET", "/v1/models"): models,
    ("GET", "/v1/models/{name:path}"): one_model,
}


# ------------------------------------------------------------------ refusals
async def refused(request: Request, refusal: Exception) -> Response:
    """Return a refusal as OpenAI's clients read it."""
    assert isinstance(refusal, RefusedRequest)
    return _refusal(refusal)


async def refused_by_route(request: Request, error: Exception) -> Response:
    """Return the refusal of a path or a method that no endpoint has."""
    assert isinstance(error, HTTPException)
    path = request.url.path[:200]
    if error.status_code == ABSENT:
        known = sorted({path for _, path in ENDPOINTS})
        reason = f"there is nothing at {path}. Known: {', '.join(known)}."
        return _refusal(RefusedRequest(reason, status=ABSENT))
    headers = dict(error.headers or {})
    reason = f"{path} takes {headers['Allow']}, not {request.method}."
    status = (
        error.status_code
        if request.method in HTTPMethod.__members__
        else UNKNOWN_METHOD
    )
    return _refusal(RefusedRequest(reason, status=status, headers=headers))


async def broken(request: Request, error: Exception) -> Response:
    """Return the answer to a request that met a defect, which uvicorn logs."""
    reason = f"{type(error).__name__}: {error}"
    return _refusal(RefusedRequest(reason, status=BROKEN))


async def left(request: Request, error: Exception) -> None:
    """Return no answer to a client that has left within its request."""


def _refusal(refusal: RefusedRequest) -> Response:
    return json_answer(refusal.as_json(), refusal.status, refusal.headers)


HANDLERS: dict[Any, Callable[..., Any]] = {
    RefusedRequest: refused,
    HTTPException: refused_by_route,
    ClientDisconnect: left,
    Exception: broken,
}


# ------------------------------------------------------------------ the whole
def application(serving: Serving, rules: BrowserRules) -> ASGIApp:
    """Return the ASGI application."""
    routes = [
        Route(path, partial(endpoint, serving), methods=[method])
        for (method, path), endpoint in ENDPOINTS.items()
    ]
    cors = Middleware(
        CORSMiddleware,
        allow_origins=rules.origins,
        allow_methods=["GET", "POST", "PUT"],
        allow_headers=["*"],
    )
    inner = Starlette(routes=routes, middleware=[cors], exception_handlers=HANDLERS)

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse the page of another site before it learns anything else."""
        # A slash at the end does not matter.
        scope["path"] = scope["path"].rstrip("/") or "/"
        try:
            rules.require(Request(scope).headers)
        except RefusedRequest as refusal:
            await _refusal(refusal)(scope, receive, send)
            return
        await inner(scope, receive, send)

    return guarded
