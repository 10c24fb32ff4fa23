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
from ..generation.model_text import text_ids
from ..generation.requests import GenerationRequest
from .refused_request import ABSENT, RefusedRequest

NO_TEMPLATE = (
    "this model has no chat template, so its messages have no text. Use /v1/completions, or start the server with "
    "--chat-template FILE."
)


@dataclass(frozen=True)
class ServedModel:
    """A model under its name.

    max_length  tokens of a prompt and its continuation together
    vocab_size  ids of prompts are smaller
    check       raises ConfigError for a request that the generator cannot run
    template    of conversations, or None
    created     seconds since 1970
    ends        tokens that end a text, besides the end of a document
    """

    name: str
    tokenizer: Tokenizer
    max_length: int
    vocab_size: int
    check: Callable[[GenerationRequest], None]
    template: ChatTemplate | None = None
    created: int = 0
    ends: frozenset[int] = frozenset()

    def require_name(self, name: str | None) -> None:
        """Raises RefusedRequest unless a request names this model, or none."""
        if name is not None and name != self.name:
            raise RefusedRequest(
                f"the model {name[:80]!r} does not exist. This server has {self.name!r}.",
                "model",
                status=ABSENT,
                code="model_not_found",
            )

    def encode(self, prompt: str | Sequence[int], param: str) -> tuple[int, ...]:
        """The tokens of a prompt, of a text with those that begin one. Raises RefusedRequest."""
        if not isinstance(prompt, str):
            self.check_ids(prompt, param)
            return tuple(prompt)
        try:
            return text_ids(self.tokenizer, prompt)
        except MegatronDSError as error:
            raise RefusedRequest(f"{param}: {error}", param) from None

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
        """The tokens of a conversation with the beginning of an answer. values: names for the template. Raises
        RefusedRequest."""
        if self.template is None:
            raise RefusedRequest(NO_TEMPLATE)
        given = {**self.template.values, **values}
        template = ChatTemplate(self.template.source, given)
        turns = ChatTurns(template, self.tokenizer, self.end_tokens)
        try:
            return turns.prompt(messages)
        except TemplateRefusal as error:
            raise RefusedRequest(
                f"the chat template does not take these messages: {error}", "messages"
            ) from None
        except MegatronDSError as error:
            raise RefusedRequest(f"messages: {error}", "messages") from None

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
        except (
            TemplateRefusal
        ):  # it takes other conversations than a question and an answer
            return self.end_tokens, ()

    def room(self, tokens: Sequence[int]) -> int:
        """How many tokens can follow these."""
        return max(self.max_length - len(tokens), 0)

    def request(self, param: str, **values: Any) -> GenerationRequest:
        """A request to the generator. param: the field that has the prompt. Raises RefusedRequest where the
        generator cannot run it."""
        try:
            request = GenerationRequest(**values)
            self.check(request)
        except MegatronDSError as error:
            raise RefusedRequest(str(error), param) from None
        return request
