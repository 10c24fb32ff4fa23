"""Where the answers of a conversation are in its rendered text.

An answer is found by exchange: the conversation is rendered again with this message replaced by one stand-in,
and by another one. What both have in common is the text before and the text after it.

    …user\nWhy?<end>\nassistant\n[Because.]<end>\nuser\n…        the text
    …user\nWhy?<end>\nassistant\n[Kestrel 41]<end>\nuser\n…      with each stand-in
    …user\nWhy?<end>\nassistant\n[9 plums wax]<end>\nuser\n…
    |         before            |           |    after    |

This needs no knowledge of the template, which may trim, reorder and drop what it likes. An answer with
reasoning or tool calls is everything between, with the template's own text around them (`</think>`), which a
model has to write, too. What is not found exactly is an error, never a guess.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from .conversation import Conversation, Message
from .template import ChatTemplate, Span, TemplateRefusal

# They begin and end with different characters, and no template has a reason to change them.
STAND_INS = ("Kestrel 41", "9 plums wax")
THOUGHTS_END = "</think>"
Render = Callable[[Sequence[Message]], str]


class AnswerNotFound(ValueError):
    """An answer has no certain place in the text. The message has its number and the reason."""


class Surroundings(NamedTuple):
    """The text before and after a message, whatever its content is."""

    before: str
    after: str


class Answers(NamedTuple):
    """A rendered conversation, and the spans of its text that are answers to learn, ascending."""

    text: str
    spans: list[Span]


def find_answers(template: ChatTemplate, conversation: Conversation) -> Answers:
    """The text of a conversation and its answers. Raises AnswerNotFound.

    The spans are those that the template marks with {% generation %}, if every answer is inside of them, and
    those found by exchange otherwise.
    """
    reason = None
    for form in conversation.forms():
        try:
            return _answers(template, form)
        except AnswerNotFound as error:
            reason = reason or error
    raise reason


def _answers(template: ChatTemplate, conversation: Conversation) -> Answers:
    render = lambda messages: template.render(messages, conversation.tools)
    try:
        text = render(conversation.messages)
    except TemplateRefusal as error:
        raise AnswerNotFound(f"the template does not render it ({error})") from None
    _check_is_encodable(text)
    places = _Places(render, text, conversation.messages)
    numbers = [i for i, is_trained in enumerate(conversation.trained) if is_trained]
    spans = [places.of(number) for number in numbers]
    # Answers follow one another.
    for number, span, later in zip(numbers, spans, spans[1:]):
        if span[1] > later[0]:
            raise AnswerNotFound(f"message {number} overlaps the next answer")
    if not template.marks_answers or not _all_answers(conversation):
        return Answers(text, spans)
    marked = template.render_marked(conversation.messages, conversation.tools)[1]
    marked = _joined(marked)
    is_agreed = all(_is_inside(span, marked) for span in spans)
    return Answers(text, marked if is_agreed else spans)


def _check_is_encodable(text: str) -> None:
    """Raises AnswerNotFound for a text with half a surrogate pair, which JSON can hold and no tokenizer takes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise AnswerNotFound(
            f"the rendered text holds half a surrogate pair at character {error.start}, from a tool or a call"
        ) from None


def _all_answers(conversation: Conversation) -> bool:
    """Whether every message of the assistant is an answer to learn: a template marks all of them."""
    by_role = tuple(m["role"] == "assistant" for m in conversation.messages)
    return by_role == conversation.trained


def _joined(spans: Sequence[Span]) -> list[Span]:
    """The spans without empty ones, those that touch made one."""
    joined: list[Span] = []
    for start, stop in spans:
        if joined and start <= joined[-1][1]:
            start = joined.pop()[0]
        if start < stop:
            joined.append((start, stop))
    return joined


def _is_inside(span: Span, outer: Sequence[Span]) -> bool:
    return any(start <= span[0] and span[1] <= stop for start, stop in outer)


class _Places:
    """The places of the messages of a conversation in its text."""

    def __init__(self, render: Render, text: str, messages: Sequence[Message]):
        self.render = render
        self.text = text
        self.messages = messages
        self._surroundings: dict[int, Surroundings] = {}

    def of(self, number: int) -> Span:
        """The span of a message of the assistant. Raises AnswerNotFound."""
        try:
            return self._in_place(number)
        except AnswerNotFound as error:
            if not self.messages[number].get("tool_calls"):
                raise
            reason = error
        # A template may print the result of a tool only after a call, so that no text can take its place.
        span = self._when_last(number)
        if span is None:
            raise reason
        return span

    def _in_place(self, number: int) -> Span:
        message = self.messages[number]
        start, stop = self._between(number)
        written = self.text[start:stop]
        # A template may trim a content.
        is_plain = not (message.get("reasoning_content") or message.get("tool_calls"))
        content = message["content"] or ""
        if is_plain and written in (content, content.strip()):
            return start, stop
        # Anything else between is reasoning, calls, and what separates them.
        self._check_parts(number, start, stop)
        self._check_neighbours(number, start, stop)
        return start, stop

    def _when_last(self, number: int) -> Span | None:
        """The span of a message in the conversation that ends with it, if the whole text begins with that."""
        messages = self.messages[: number + 1]
        try:
            shorter = _Places(self.render, self.render(messages), messages)
            start, stop = shorter._in_place(number)
        except ValueError:
            return None
        # What follows a call may be the beginning of a result unless the turn ends as others do.
        has_end = shorter.text.endswith(shorter._around(number).after)
        is_same = self.text.startswith(shorter.text[:stop])
        return (start, stop) if has_end and is_same else None

    def _between(self, number: int) -> Span:
        """The part of the text that differs from the text with a stand-in."""
        before, after = self._around(number)
        start = len(os.path.commonprefix([self.text, before]))
        tail = os.path.commonprefix([self.text[::-1], after[::-1]])
        stop = len(self.text) - len(tail)
        if start >= stop:
            raise AnswerNotFound(
                f"message {number} is not in the text: the template does not print what it has"
            )
        return start, stop

    def _around(self, number: int) -> Surroundings:
        if number not in self._surroundings:
            self._surroundings[number] = self._exchange(number)
        return self._surroundings[number]

    def _exchange(self, number: int) -> Surroundings:
        """Raises AnswerNotFound if the template does not print a content as it is, once."""
        role = self.messages[number]["role"]
        texts = []
        for stand_in in STAND_INS:
            kept = {} if role == "assistant" else self.messages[number]
            changed = list(self.messages)
            changed[number] = {**kept, "role": role, "content": stand_in}
            try:
                texts.append(self.render(changed))
            except TemplateRefusal as error:
                raise AnswerNotFound(
                    f"message {number} has no place of its own: with another content the template "
                    f"does not render the conversation ({error})"
                ) from None
        # What both texts have in common.
        before = os.path.commonprefix(texts)
        after = os.path.commonprefix([text[::-1] for text in texts])[::-1]
        expected = [before + stand_in + after for stand_in in STAND_INS]
        if texts != expected:
            raise AnswerNotFound(
                f"message {number} has no place of its own: the template prints its content "
                "changed, several times, or not at all"
            )
        return Surroundings(before, after)

    def _check_parts(self, number: int, start: int, stop: int) -> None:
        """Raises AnswerNotFound unless all parts of an answer are in the text that was found."""
        message = self.messages[number]
        written = self.text[start:stop]
        reasoning = message.get("reasoning_content") or ""
        content = message["content"] or ""
        # Thoughts inside of a content are cut off by many templates, as those of earlier turns are.
        thoughts, mark, rest = content.rpartition(THOUGHTS_END)
        if mark and content.strip() not in written:
            content = rest
            reasoning = thoughts.removeprefix("<think>")
        if reasoning.strip() not in written:
            # It may begin as the text after it does, so that its beginning seems to be no part of it.
            if reasoning.strip() in self.text[max(0, start - len(reasoning)) : stop]:
                raise AnswerNotFound(
                    f"the reasoning of message {number} has no clear beginning"
                )
            self._check_is_dropped(number, reasoning)
        for part in (content, *_words_of_calls(message)):
            if part.strip() not in written:
                raise AnswerNotFound(
                    f"message {number} is printed changed: the text has {_short(written)}, and not "
                    f"{_short(part.strip())}"
                )

    def _check_is_dropped(self, number: int, reasoning: str) -> None:
        """Raises AnswerNotFound if the template has no place for reasoning even in the last answer."""
        try:
            text = self.render(self.messages[: number + 1])
        except TemplateRefusal:
            text = ""
        if reasoning.strip() not in text:
            raise AnswerNotFound(
                f"message {number} has reasoning, which the template does not print. Use a template "
                "that does, or remove the reasoning"
            )

    def _check_neighbours(self, number: int, start: int, stop: int) -> None:
        """Raises AnswerNotFound if the span reaches into the message before or after."""
        last = len(self.messages) - 1
        if number > 0 and self._between(number - 1)[1] > start:
            raise AnswerNotFound(
                f"message {number} cannot be separated from the one before"
            )
        if number < last and self._between(number + 1)[0] < stop:
            raise AnswerNotFound(
                f"message {number} cannot be separated from the one after"
            )


def _words_of_calls(message: Message) -> Iterator[str]:
    """Names of functions and of their arguments, which every template prints as they are."""
    for call in message.get("tool_calls", ()):
        function = call["function"]
        yield function["name"]
        if isinstance(function["arguments"], dict):
            yield from function["arguments"]


def _short(text: str, most: int = 60) -> str:
    shown = repr(text)
    return shown if len(shown) <= most else f"{shown[:most]}…"
