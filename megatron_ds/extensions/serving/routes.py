"""Which function answers which path: endpoints that generate, and pages that do not."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import unquote

from .chat_completions import chat_completions
from .completions import completions
from .generation_loop import GenerationLoop
from .megatron_text import megatron_text
from .openai_reply import ReplyPart
from .request_fields import Values
from .served_model import ServedModel
from .try_page import page

JSON_TYPE = "application/json"
HTML_TYPE = "text/html; charset=utf-8"
Route = tuple[str, str]  # method, path
MODELS = "/v1/models"
ONE_MODEL = f"{MODELS}/{{model}}"


@dataclass(frozen=True)
class Serving:
    """The model and the loop that answer requests."""

    model: ServedModel
    loop: GenerationLoop


class Reply(Protocol):
    """An answer that is being generated. One that `streams` is an `OpenAIReply`."""

    @property
    def parts(self) -> Sequence[ReplyPart]: ...
    @property
    def streams(self) -> bool: ...

    def whole(self) -> dict[str, Any]:
        """Return the answer, once all texts are complete."""


def known_path(path: str) -> str:
    """Return the path as the tables here have it, without the name of a model."""
    return ONE_MODEL if path.startswith(f"{MODELS}/") else path


def _models(serving: Serving, path: str) -> bytes:
    """Return the list of the one model."""
    data = [_entry(serving.model)]
    return json.dumps({"object": "list", "data": data}).encode()


def _one_model(serving: Serving, path: str) -> bytes:
    """Return the model that the path names. Raises RefusedRequest for another one."""
    serving.model.require_name(unquote(path.removeprefix(f"{MODELS}/")))
    return json.dumps(_entry(serving.model)).encode()


def _entry(model: ServedModel) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "megatron_ds",
        "max_model_len": model.max_length,
    }


def _health(serving: Serving, path: str) -> bytes:
    """Raises RefusedRequest where a request would not be answered."""
    serving.loop.require_open()
    return b'{"status": "ok"}'


# Routes whose answer is generated from a body.
ENDPOINTS: dict[Route, Callable[[Values, ServedModel], Reply]] = {
    ("POST", "/v1/completions"): completions,
    ("POST", "/completions"): completions,
    ("POST", "/v1/chat/completions"): chat_completions,
    ("PUT", "/api"): megatron_text,
}
# Routes with a type, and a function that returns the content for a path.
PAGES: dict[Route, tuple[str, Callable[[Serving, str], bytes]]] = {
    ("GET", "/"): (HTML_TYPE, lambda serving, path: page(serving.model)),
    ("GET", "/health"): (JSON_TYPE, _health),
    ("GET", MODELS): (JSON_TYPE, _models),
    ("GET", ONE_MODEL): (JSON_TYPE, _one_model),
}
