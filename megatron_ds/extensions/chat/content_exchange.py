"""`Exchanges`: the place of a message in the text of its conversation, by exchange.

The conversation is rendered again with this message replaced by one stand-in, and by another one. What both have
in common is the text before and the text after it.

    …user\nWhy?<end>\nassistant\n[Because.]<end>\nuser\n…        the text
    …user\nWhy?<end>\nassistant\n[Kestrel 41]<end>\nuser\n…      with each stand-in
    …user\nWhy?<end>\nassistant\n[9 plums wax]<end>\nuser\n…
    |         before            |           |    after    |

This needs no knowledge of the template, which may trim, reorder and drop what it likes.
"""

import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

from .conversation import Message, with_content
from .template import Span, TemplateRefusal

# They begin and end with different characters, and no template has a reason to change them.
STAND_INS = ("Kestrel 41", "9 plums wax")
Render = Callable[[Sequence[Message]], str]


class AnswerNotFound(ValueError):
    """An answer has no certain place in the text. The message has its number and the reason."""


class Surroundings(NamedTuple):
    """The text before and after a message, whatever its content is."""

    before: str
    after: str


class Exchanges:
    """The places of the messages of a conversation in its text."""

    def __init__(self, render: Render, text: str, messages: Sequence[Message]):
        self.render = render
        self.text = text
        self.messages = messages
        self._surroundings: dict[int, Surroundings] = {}

    def place(self, number: int) -> Span:
        """Return the part of the text that differs from the text with a stand-in. Raises AnswerNotFound."""
        before, after = self._around(number)
        start = len(os.path.commonprefix([self.text, before]))
        tail = os.path.commonprefix([self.text[::-1], after[::-1]])
        stop = len(self.text) - len(tail)
        # An empty content is between what both texts have in common.
        return start, max(start, stop)

    def place_if_any(self, number: int) -> Span | None:
        """`place`; None for a message without a place, or outside of the conversation."""
        if not 0 <= number < len(self.messages):
            return None
        try:
            return self.place(number)
        except AnswerNotFound:
            return None

    def _around(self, number: int) -> Surroundings:
        if number not in self._surroundings:
            self._surroundings[number] = self._exchange(number)
        return self._surroundings[number]

    def _exchange(self, number: int) -> Surroundings:
        """Raises AnswerNotFound if the template does not print a content as it is, once."""
        texts = []
        for stand_in in STAND_INS:
            changed = list(self.messages)
            changed[number] = with_content(self.messages[number], stand_in)
            try:
                texts.append(self.render(changed))
            except TemplateRefusal as error:
                raise AnswerNotFound(
                    f"message {number} has no place of its own: with another content the template "
                    f"does not render the conversation ({error})"
                ) from None
        # Both texts differ in the content alone, if the template prints it as it is.
        before = os.path.commonprefix(texts)
        after = os.path.commonprefix([text[::-1] for text in texts])[::-1]
        expected = [before + stand_in + after for stand_in in STAND_INS]
        if texts != expected:
            raise AnswerNotFound(
                f"message {number} has no place of its own: the template prints its content "
                "changed, several times, or not at all"
            )
        return Surroundings(before, after)
