"""`ServedModel`: what endpoints need of a model to read a request: names, tokens, lengths."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ...data.tokenizers import Tokenizer
from ...errors import MegatronDSError
from ..chat.conversation import Message
from ..chat.template import ChatTemplate, TemplateRefusal
from ..generation.chat_turns import ChatTurns
from ..generation.model_text import rendered_ids, text_ids
from ..generation.requests import GenerationRequest
from .refused_request import ABSENT, RefusedRequest

NO_TEMPLATE = (
    "this model has no chat template, so its messages have no text. Use /v1/completions, or start the server with "
    "--chat-template FILE."
)
# Names that a template gets with every request.
RESERVED = {
    *("messages", "conversations", "chat_template", "tools", "documents"),
    *(
        "add_generation_prompt",
        "continue_final_message",
        "return_assistant_tokens_mask",
    ),
}
TOO_LONG = "context_length_exceeded"  # OpenAI's
MOST_BODY = 16 << 20  # bytes, whatever the model is
LONGEST_ESCAPE = 6  # bytes of a character in JSON, \\u0041
OTHER_FIELDS = 1 << 20  # bytes of a request without its texts
FIRST_PART = 1 << 18  # characters


@dataclass(frozen=True)
class ServedModel:
    """A model under its name.

    max_length  tokens of a prompt and its continuation together
    vocab_size  ids of prompts are smaller
    check       raises ConfigError for a request that the generator cannot run
    template    of conversations, or None
    created     seconds since 1970
    ends        tokens that end a text, besides the end of a document
    most_texts  that are generated or wait at a time
    """

    name: str
    tokenizer: Tokenizer
    max_length: int
    vocab_size: int
    check: Callable[[GenerationRequest], None]
    template: ChatTemplate | None = None
    created: int = 0
    ends: frozenset[int] = frozenset()
    most_texts: int = 4096

    def require_name(self, name: str | None) -> None:
        """Raises RefusedRequest unless a request names this model, or none."""
        if name is not None and name != self.name:
            raise RefusedRequest(
                f"the model {name[:80]!r} does not exist. This server has {self.name!r}.",
                "model",
                status=ABSENT,
                code="model_not_found",
            )

    @cached_property
    def longest_text(self) -> int:
        """Return the characters above which a text cannot fit and is not encoded. A token may add a blank."""
        longest = max(
            len(self.tokenizer.decode([number]).encode())
            for number in range(self.tokenizer.vocab_size)
        )
        return self.max_length * (longest + 1)

    @property
    def most_body(self) -> int:
        """Bytes of a request that this server can use: all texts that it takes, each character written as an escape."""
        texts = self.most_texts * self.longest_text * LONGEST_ESCAPE
        return min(OTHER_FIELDS + texts, MOST_BODY)

    def check_texts(self, count: int, param: str) -> None:
        """Raises RefusedRequest for more texts in a request than this server takes at a time."""
        if count > self.most_texts:
            raise RefusedRequest(
                f"the request asks for {count:,} texts at once, and this server takes {self.most_texts:,} "
                "(--max-requests). Ask for fewer.",
                param,
            )

    def encode(self, prompt: str | Sequence[int], param: str) -> tuple[int, ...]:
        """Return the tokens of a prompt, of a text with those that begin one. Raises RefusedRequest."""
        if not isinstance(prompt, str):
            self._check_length(len(prompt), param)
            self.check_ids(prompt, param)
            return tuple(prompt)
        return self._encoded(prompt, param, text_ids)

    def _encoded(
        self,
        text: str,
        param: str,
        encode: Callable[[Tokenizer, str], Sequence[int]],
    ) -> tuple[int, ...]:
        """Return the tokens of a text that may fit. Raises RefusedRequest."""
        if len(text) > self.longest_text:
            raise RefusedRequest(
                f"{param} has a text of {len(text):,} characters. A text of this model has at most {self.max_length} "
                f"tokens, which are no more than {self.longest_text:,} characters. Shorten it.",
                param,
                code=TOO_LONG,
            )
        try:
            # If tokens may be long, a beginning of the text shows how many there are.
            size = FIRST_PART
            while size < len(text):
                self._check_length(len(encode(self.tokenizer, text[:size])) // 2, param)
                size *= 2
            return tuple(encode(self.tokenizer, text))
        except MegatronDSError as error:
            raise RefusedRequest(f"{param}: {error}", param) from None

    def _check_length(self, count: int, param: str) -> None:
        """Raises RefusedRequest for more tokens than a text has."""
        if count > self.max_length:
            raise RefusedRequest(
                f"{param} has more than {self.max_length} tokens, and a text of this model has at most as many. "
                "Shorten it.",
                param,
                code=TOO_LONG,
            )

    def check_ids(self, ids: Sequence[int], param: str) -> None:
        """Raises RefusedRequest for ids of a field that are no tokens."""
        wrong = [number for number in ids if not 0 <= number < self.vocab_size]
        if wrong:
            raise RefusedRequest(
                f"{param} has the token {str(wrong[0])[:40]}, and the vocabulary is 0 to {self.vocab_size - 1}.",
                param,
            )

    def render(
        self, messages: Sequence[Message], values: Mapping[str, Any]
    ) -> tuple[int, ...]:
        """Return the tokens of a conversation with the beginning of an answer. values: names for the template. Raises
        RefusedRequest."""
        if self.template is None:
            raise RefusedRequest(NO_TEMPLATE)
        if reserved := sorted(RESERVED & values.keys()):
            raise RefusedRequest(
                f"chat_template_kwargs has {', '.join(reserved)}, which the server itself gives to the template. Leave "
                "it out.",
                "chat_template_kwargs",
            )
        given = {**self.template.values, **values}
        template = ChatTemplate(self.template.source, given)
        turns = ChatTurns(template, self.tokenizer, self.end_tokens)
        try:
            text = turns.text(messages)
        except TemplateRefusal as error:
            raise RefusedRequest(
                f"the chat template does not take these messages: {error}", "messages"
            ) from None
        except MegatronDSError as error:
            raise RefusedRequest(f"messages: {error}", "messages") from None
        return self._encoded(text, "messages", rendered_ids)

    @property
    def end_tokens(self) -> frozenset[int]:
        """Tokens that end a text."""
        return self.ends | {self.tokenizer.eod}

    @cached_property
    def answer_ends(self) -> tuple[frozenset[int], tuple[str, ...]]:
        """Tokens that end an answer, and strings where the template ends it with no special token."""
        if self.template is None:
            return self.end_tokens, ()
        turns = ChatTurns(self.template, self.tokenizer, self.end_tokens)
        try:
            return turns.stop_tokens, turns.stops
        except TemplateRefusal:  # the template does not take a question and an answer
            return self.end_tokens, ()

    def room(self, tokens: Sequence[int]) -> int:
        """Return how many tokens can follow these."""
        return max(self.max_length - len(tokens), 0)

    def request(self, param: str, **values: Any) -> GenerationRequest:
        """Return a request to the generator. param: the field that has the prompt. Raises RefusedRequest where the
        generator cannot run it."""
        try:
            request = GenerationRequest(**values)
            self.check(request)
        except MegatronDSError as error:
            raise RefusedRequest(str(error), param) from None
        return request
