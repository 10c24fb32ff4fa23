"""Which function answers which path: endpoints that generate, and pages that do not."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

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


@dataclass(frozen=True)
class Serving:
    """What requests are answered with."""

    model: ServedModel
    loop: GenerationLoop


class Reply(Protocol):
    """An answer that is being generated. One that `streams` is an `OpenAIReply`."""

    parts: Sequence[ReplyPart]
    streams: bool

    def whole(self) -> dict[str, Any]:
        """The answer, once all texts are complete."""


def _models(serving: Serving) -> bytes:
    """The list of the one model."""
    model = serving.model
    entry = {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "megatron_ds",
        "max_model_len": model.max_length,
    }
    return json.dumps({"object": "list", "data": [entry]}).encode()


def _health(serving: Serving) -> bytes:
    """Raises RefusedRequest where a request would not be answered."""
    serving.loop.require_open()
    return b'{"status": "ok"}'


# What is generated from a body.
ENDPOINTS: dict[Route, Callable[[Values, ServedModel], Reply]] = {
    ("POST", "/v1/completions"): completions,
    ("POST", "/completions"): completions,
    ("POST", "/v1/chat/completions"): chat_completions,
    ("PUT", "/api"): megatron_text,
}
# A type and a content.
PAGES: dict[Route, tuple[str, Callable[[Serving], bytes]]] = {
    ("GET", "/"): (HTML_TYPE, lambda serving: page(serving.model)),
    ("GET", "/health"): (JSON_TYPE, _health),
    ("GET", "/v1/models"): (JSON_TYPE, _models),
}
