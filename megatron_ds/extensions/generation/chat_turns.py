"""`ChatTurns`: a conversation as the prompt of its next answer, and where that answer ends."""

from collections.abc import Sequence
from functools import cached_property

from ...data.tokenizers import Tokenizer
from ..chat.conversation import Message
from ..chat.template import ChatTemplate
from .model_text import rendered_ids

PROBE = "probe"  # an answer that shows what the template writes after it


class ChatTurns:
    """Prompts by the chat template of a model.

    ends  the tokens that end a text of the model
    """

    def __init__(
        self, template: ChatTemplate, tokenizer: Tokenizer, ends: frozenset[int]
    ):
        self._template = template
        self._tokenizer = tokenizer
        self._ends = ends

    def prompt(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Return the tokens that the model continues with its answer. Raises `template.TemplateRefusal`."""
        return rendered_ids(self._tokenizer, self.text(messages))

    def text(self, messages: Sequence[Message]) -> str:
        """Return the text of `prompt`. Raises `template.TemplateRefusal`."""
        return self._template.render_prompt(messages)

    @property
    def stop_tokens(self) -> frozenset[int]:
        """Return the tokens that end an answer: those that end a text, and a special token that follows an answer."""
        return self._ends.union(self._special_end)

    @property
    def stops(self) -> tuple[str, ...]:
        """Return the strings that end an answer if no special token does."""
        end = self._end.strip()
        return (end,) if end and not self._special_end else ()

    @cached_property
    def _end(self) -> str:
        """Return what the template writes after an answer."""
        chat = [
            {"role": "user", "content": PROBE},
            {"role": "assistant", "content": PROBE},
        ]
        return self._template.render(chat).rpartition(PROBE)[2]

    @property
    def _special_end(self) -> tuple[int, ...]:
        special: frozenset[int] = getattr(self._tokenizer, "special_ids", frozenset())
        first = self._tokenizer.encode(self._end)[:1]
        return tuple(token for token in first if token in special)
