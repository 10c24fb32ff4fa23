"""`ServedModel`: what endpoints need of a model to read a request: names, tokens, lengths."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ...data.chat.conversation import Message
from ...data.chat.loss_masks import turn_end_of
from ...data.chat.template import ChatTemplate, TemplateRefusal
from ...data.tokenizers import Tokenizer
from ...errors import MegatronDSError
from ..generation.requests import GenerationRequest
from .refused_request import RefusedRequest

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
    """

    name: str
    tokenizer: Tokenizer
    max_length: int
    vocab_size: int
    check: Callable[[GenerationRequest], None]
    template: ChatTemplate | None = None
    created: int = 0

    def require_name(self, name: str | None) -> None:
        """Raises RefusedRequest unless a request names this model, or none."""
        if name is not None and name != self.name:
            raise RefusedRequest(
                f"the model {name[:80]!r} does not exist. This server has {self.name!r}.",
                "model",
                status=404,
                code="model_not_found",
            )

    def encode(self, prompt: str | Sequence[int], param: str) -> tuple[int, ...]:
        """The tokens of a prompt; the beginning of a text is put in front of a text. Raises RefusedRequest."""
        if not isinstance(prompt, str):
            self._check_ids(prompt, param)
            return tuple(prompt)
        ids = self._encoded(prompt, param)
        begin = list(getattr(self.tokenizer, "beginning", ()))
        if begin and ids[: len(begin)] != begin:
            ids = [*begin, *ids]
        # An empty text follows the end of another.
        return tuple(ids) or (self.tokenizer.eod,)

    def _encoded(self, text: str, param: str) -> list[int]:
        try:
            return self.tokenizer.encode(text)
        except MegatronDSError as error:
            raise RefusedRequest(f"{param}: {error}", param) from None

    def _check_ids(self, ids: Sequence[int], param: str) -> None:
        wrong = [number for number in ids if not 0 <= number < self.vocab_size]
        if wrong:
            raise RefusedRequest(
                f"{param} has the token {str(wrong[0])[:40]}, and the vocabulary is 0 to {self.vocab_size - 1}.",
                param,
            )

    def render(
        self, messages: Sequence[Message], values: dict[str, Any]
    ) -> tuple[int, ...]:
        """The tokens of a conversation with the opening of an answer. Raises RefusedRequest."""
        if self.template is None:
            raise RefusedRequest(NO_TEMPLATE)
        given = {**self.template.values, **values, "add_generation_prompt": True}
        try:
            text = ChatTemplate(self.template.source, given).render(messages)
        except TemplateRefusal as error:
            raise RefusedRequest(
                f"the chat template does not take these messages: {error}", "messages"
            ) from None
        # The template writes what begins a text.
        return tuple(self._encoded(text, "messages"))

    @property
    def end_tokens(self) -> frozenset[int]:
        """Tokens that end a text: the end of a document."""
        return frozenset((self.tokenizer.eod,))

    @cached_property
    def turn_ends(self) -> frozenset[int]:
        """Tokens that end an answer: those that end a text, and the one that the template writes behind it."""
        special = getattr(self.tokenizer, "special_ids", frozenset())
        if self.template is None or not special:
            return self.end_tokens
        end = self.tokenizer.encode(turn_end_of(self.template, self.tokenizer))
        return self.end_tokens | (special & set(end[-1:]))

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
