"""/v1/chat/completions of OpenAI's API: a conversation becomes text by the model's template, and is continued."""

from collections.abc import Iterator
from typing import Any

from ..chat.conversation import Message, messages_of
from .accepted_fields import OF_CHATS
from .openai_reply import OpenAIReply, ReplyPart
from .refused_request import RefusedRequest
from .request_fields import RequestField, Values, read_fields
from .sampling_fields import (
    MOST_TOKENS,
    SAMPLING,
    least_of,
    sampling_of,
    seed_of,
    stop_tokens_of,
    stops_of,
)
from .served_model import ServedModel
from .served_text import Delta, ServedText
from .served_tokens import chat_log_probs

MOST_ALTERNATIVES = 20
# Fields that become names of the template, unless chat_template_kwargs has them.
OF_TEMPLATES = ("reasoning_effort", "enable_thinking")
FIELDS: dict[str, RequestField] = {
    "model": RequestField("text"),
    "messages": RequestField("list", least=1, most=4096),
    "max_tokens": RequestField("integer", None, 1, MOST_TOKENS, nothing=(-1,)),
    "max_completion_tokens": RequestField(
        "integer", None, 1, MOST_TOKENS, nothing=(-1,)
    ),
    "logprobs": RequestField("boolean", False),
    "top_logprobs": RequestField("integer", None, 0, MOST_ALTERNATIVES),
    "chat_template_kwargs": RequestField("object", {}),
    "reasoning_effort": RequestField("text"),
    "enable_thinking": RequestField("boolean"),
    **SAMPLING,
    **OF_CHATS,
}


class ChatReply(OpenAIReply):
    """The answer to a conversation. A stream begins with the role of each choice."""

    prefix = "chatcmpl-"
    kinds = ("chat.completion", "chat.completion.chunk")

    @property
    def shows_log_probs(self) -> bool:
        return self.values["logprobs"]

    def opening(self) -> Iterator[dict[str, Any]]:
        """Yield a chunk of each choice with the role of the message."""
        for index in range(len(self.parts)):
            choice = self._choice(index, {"role": "assistant", "content": ""}, None)
            yield self.envelope([{**choice, "finish_reason": None}], True)

    def choice(self, index: int, delta: Delta, is_chunk: bool) -> dict[str, Any]:
        """Return a choice with what is new of its message."""
        log_probs = None
        if self.shows_log_probs:
            most = self.values["top_logprobs"] or 0
            log_probs = chat_log_probs(delta.entries, most)
        if not is_chunk:
            message = {"role": "assistant", "content": delta.text, "refusal": None}
            return {
                "index": index,
                "message": message,
                "logprobs": log_probs,
                "finish_reason": delta.finish,
            }
        content = {"content": delta.text} if delta.text else {}
        choice = self._choice(index, content, log_probs)
        return {**choice, "finish_reason": delta.finish}

    def _choice(self, index: int, content: dict, log_probs: dict | None) -> dict:
        return {"index": index, "delta": content, "logprobs": log_probs}


def chat_completions(body: Values, model: ServedModel) -> ChatReply:
    """Read a request. Raises RefusedRequest."""
    values = read_fields(body, FIELDS, "messages")
    model.require_name(values["model"])
    if values["top_logprobs"] is not None and not values["logprobs"]:
        raise RefusedRequest(
            "top_logprobs needs logprobs: true. Add it, or remove top_logprobs.",
            "top_logprobs",
        )
    messages = _messages(values["messages"])
    named = {name: values[name] for name in OF_TEMPLATES}
    given = {name: value for name, value in named.items() if value is not None}
    tokens = model.render(messages, given | values["chat_template_kwargs"])
    return ChatReply(list(_parts_of(tokens, values, model)), values, model)


def _messages(value: list) -> list[Message]:
    try:
        return messages_of(value)
    except ValueError as error:
        raise RefusedRequest(f"messages: {error}.", "messages") from None


def _parts_of(
    tokens: tuple[int, ...], values: Values, model: ServedModel
) -> Iterator[ReplyPart]:
    """Yield the n answers, each with a seed of its own."""
    given = values["max_completion_tokens"] or values["max_tokens"]
    most = given or max(model.room(tokens), 1)
    model.check_ids(values["stop_token_ids"], "stop_token_ids")
    seed = seed_of(values)
    end_tokens, ends = model.answer_ends
    stops = (*stops_of(values), *ends)
    for number in range(values["n"]):
        request = model.request(
            "messages",
            tokens=tokens,
            sampling=sampling_of(values, seed + number),
            max_new_tokens=most,
            min_new_tokens=least_of(values, most),
            stop_tokens=stop_tokens_of(values, end_tokens),
            alternatives=(values["top_logprobs"] or 0) if values["logprobs"] else None,
        )
        yield ReplyPart(request, ServedText(model.tokenizer, tokens, stops, most))
