"""/v1/chat/completions of OpenAI's API: a conversation becomes text by the model's template, and is continued."""

from collections.abc import Iterator
from typing import Any

from pydantic import Field

from ..chat.conversation import Message, messages_of
from .accepted_fields import OF_CHATS
from .openai_reply import OpenAIReply, ReplyPart
from .refused_request import RefusedRequest
from .request_fields import Values, integer
from .sampling_fields import MOST_TOKENS, Count, SamplingFields
from .served_model import ServedModel
from .served_text import Delta, ServedText
from .served_tokens import chat_log_probs

MOST_ALTERNATIVES = 20
MOST_MESSAGES = 4096


class ChatFields(SamplingFields):
    """What /v1/chat/completions reads."""

    harmless = OF_CHATS
    messages: list[Any] = Field(
        min_length=1,
        max_length=MOST_MESSAGES,
        description=f"a list of 1 to {MOST_MESSAGES:,} messages",
    )
    max_tokens: Count = integer(None, 1, MOST_TOKENS)
    max_completion_tokens: Count = integer(None, 1, MOST_TOKENS)
    logprobs: bool = False
    top_logprobs: int | None = integer(None, 0, MOST_ALTERNATIVES)
    chat_template_kwargs: dict[str, Any] = {}
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None

    def of_template(self) -> dict[str, Any]:
        """Return the names that the template reads."""
        named = {
            "reasoning_effort": self.reasoning_effort,
            "enable_thinking": self.enable_thinking,
        }
        given = {name: value for name, value in named.items() if value is not None}
        return given | self.chat_template_kwargs


class ChatReply(OpenAIReply):
    """The answer to a conversation. A stream begins with the role of each choice."""

    prefix = "chatcmpl-"
    kinds = ("chat.completion", "chat.completion.chunk")
    asked: ChatFields

    @property
    def shows_log_probs(self) -> bool:
        return self.asked.logprobs

    def opening(self) -> Iterator[dict[str, Any]]:
        """Yield a chunk of each choice with the role of the message."""
        for index in range(len(self.parts)):
            choice = self._choice(index, {"role": "assistant", "content": ""}, None)
            yield self.envelope([{**choice, "finish_reason": None}], True)

    def choice(self, index: int, delta: Delta, is_chunk: bool) -> dict[str, Any]:
        """Return a choice with what is new of its message."""
        log_probs = None
        if self.shows_log_probs:
            most = self.asked.top_logprobs or 0
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
    asked = ChatFields.read(body)
    model.require_name(asked.model)
    if asked.top_logprobs is not None and not asked.logprobs:
        raise RefusedRequest(
            "top_logprobs needs logprobs: true. Add it, or remove top_logprobs.",
            "top_logprobs",
        )
    tokens = model.render(_messages(asked.messages), asked.of_template())
    return ChatReply(list(_parts_of(tokens, asked, model)), asked, model)


def _messages(value: list) -> list[Message]:
    try:
        return messages_of(value)
    except ValueError as error:
        raise RefusedRequest(f"messages: {error}.", "messages") from None


def _parts_of(
    tokens: tuple[int, ...], asked: ChatFields, model: ServedModel
) -> Iterator[ReplyPart]:
    """Yield the n answers, each with a seed of its own."""
    given = asked.max_completion_tokens or asked.max_tokens
    most = given or max(model.room(tokens), 1)
    model.check_ids(asked.stop_token_ids, "stop_token_ids")
    seed = asked.first_seed()
    end_tokens, ends = model.answer_ends
    stops = (*asked.stops(), *ends)
    for number in range(asked.n):
        request = model.request(
            "messages",
            tokens=tokens,
            sampling=asked.sampling(seed + number),
            max_new_tokens=most,
            min_new_tokens=asked.least(most),
            stop_tokens=asked.stop_tokens(end_tokens),
            alternatives=(asked.top_logprobs or 0) if asked.logprobs else None,
        )
        yield ReplyPart(request, ServedText(model.tokenizer, tokens, stops, most))
