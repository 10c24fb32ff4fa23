"""Where the answers of a conversation are in its rendered text: what the model writes, turn by turn.

An answer is what follows the generation prompt (`Turns`), with the end of its turn: headers of channels, `<think>`,
calls, and the template's own text between them. What the template prints of a message is compared with what the
message has; a content or a call that is missing is an error, never a guess. What is only found by the place of its
content is a doubt, which is reported with the text.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .content_exchange import AnswerNotFound
from .conversation import Conversation, text_of
from .template import ChatTemplate, Span, TemplateRefusal
from .turns import THOUGHTS_END, Turns, parts_of

SHOWN_AROUND = 80  # characters before and after what a doubt is about
NO_HEADER = (
    "an answer does not continue the generation prompt of the template, so that only its content and its end are "
    "learned, not what the template writes before"
)
NO_TURN_END = (
    "the end of an answer's turn was not found in the text, so that it is not learned"
)
NO_REASONING = (
    "an answer has reasoning that the template does not print, so that it is not learned: use a template that does, "
    "or remove the reasoning"
)
NO_CONTENT = "an answer has a text beside its calls that the template does not print, so that it is not learned"
UNMARKED = (
    "an answer is outside of the template's {% generation %}: what is learned of it was found in the text "
    "instead"
)


class Doubt(NamedTuple):
    """Something about an answer that is probably not what was meant. reason: one of the texts above."""

    reason: str
    sample: str


class Answers(NamedTuple):
    """A rendered conversation, and the spans of its text that are answers to learn, ascending.

    unended: the ends of answers after which the template prints no end of the turn
    """

    text: str
    spans: list[Span]
    unended: list[int]
    doubts: list[Doubt]


def find_answers(template: ChatTemplate, conversation: Conversation) -> Answers:
    """Return the text of a conversation and its answers. Raises AnswerNotFound.

    The spans are those that the template marks with {% generation %}, if every answer is inside of them, and
    those that follow the generation prompts otherwise.
    """
    reason: AnswerNotFound | None = None
    for form in conversation.forms():
        try:
            return _answers(template, form)
        except AnswerNotFound as error:
            reason = reason or error
    assert reason is not None, "a conversation has a form"
    raise reason


def _answers(template: ChatTemplate, conversation: Conversation) -> Answers:
    try:
        text = template.render(conversation.messages, conversation.tools)
    except TemplateRefusal as error:
        raise AnswerNotFound(f"the template does not render it ({error})") from None
    _check_is_encodable(text)
    turns = Turns(template, conversation, text)
    found = Answers(text, [], [], [])
    numbers = [i for i, is_trained in enumerate(conversation.trained) if is_trained]
    for number in numbers:
        _add(found, turns, number)
    if template.marks_answers and _all_answers(conversation):
        return _with_marks(found, turns, numbers)
    return found


def _add(found: Answers, turns: Turns, number: int) -> None:
    """Append the span of a message. Raises AnswerNotFound."""
    begin = turns.begin(number)
    end = turns.end(number, begin.at)
    start = begin.at
    stop = end.at
    if not turns.text[start:stop].strip():
        raise AnswerNotFound(
            f"message {number} is not in the text: the template does not print what it has"
        )
    # Answers follow one another.
    if found.spans and found.spans[-1][1] > start:
        raise AnswerNotFound(f"message {number} overlaps the answer before")
    missing = list(_doubts_of_parts(turns, number, turns.text[start:stop]))
    found.spans.append((start, stop))
    if not turns.has_end(number, start, stop):
        found.unended.append(stop)
    # Doubts are found now, while the part of the text is known.
    edges = {NO_HEADER: begin, NO_TURN_END: end}
    reasons = [reason for reason, edge in edges.items() if not edge.is_sure]
    sample = turns.text[max(0, start - SHOWN_AROUND) : stop + SHOWN_AROUND]
    found.doubts.extend(Doubt(reason, sample) for reason in (*reasons, *missing))


def _with_marks(found: Answers, turns: Turns, numbers: Sequence[int]) -> Answers:
    """Return the spans that the template marks, with the ends of turns, if the marks hold all contents."""
    marks = turns.template.render_marked(turns.messages, turns.tools)[1]
    marked = _joined(marks)
    tails = []
    for number, span in zip(numbers, found.spans):
        content = text_of(turns.messages[number]).strip()
        at = turns.text.rfind(content, *span)
        inside = (at, at + len(content)) if content and at >= 0 else span
        if not _is_inside(inside, marked):
            return found._replace(doubts=[*found.doubts, Doubt(UNMARKED, turns.text)])
        tails.append((inside[1], span[1]))
    return found._replace(spans=_joined(sorted([*marked, *tails])))


def _check_is_encodable(text: str) -> None:
    """Raises AnswerNotFound for a text with half a surrogate pair, which JSON can hold and no tokenizer takes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise AnswerNotFound(
            f"the rendered text holds half a surrogate pair at character {error.start}, from a tool or a call"
        ) from None


def _all_answers(conversation: Conversation) -> bool:
    """Return whether every message of the assistant is an answer to learn. The marks of a template are around
    all of them.
    """
    by_role = tuple(m["role"] == "assistant" for m in conversation.messages)
    return by_role == conversation.trained


def _joined(spans: Sequence[Span]) -> list[Span]:
    """Return the spans without empty ones, and join those that touch."""
    joined: list[Span] = []
    for start, stop in spans:
        if joined and start <= joined[-1][1]:
            first, last = joined.pop()
            start = first
            stop = max(stop, last)
        if start < stop:
            joined.append((start, stop))
    return joined


def _is_inside(span: Span, outer: Sequence[Span]) -> bool:
    return any(start <= span[0] and span[1] <= stop for start, stop in outer)


def _doubts_of_parts(turns: Turns, number: int, written: str) -> Iterator[str]:
    """Return which parts of an answer its text lacks. Raises AnswerNotFound if a content or a call is missing."""
    message = turns.messages[number]
    for part in parts_of(message):
        if part not in written:
            raise AnswerNotFound(
                f"message {number} is printed changed: the text has {_short(written)}, and not "
                f"{_short(part)}"
            )
    # Many templates cut off thoughts inside of a content, as they do those of earlier turns.
    content = text_of(message)
    thoughts, _, said = content.rpartition(THOUGHTS_END)
    if said.strip() not in written:
        yield NO_CONTENT
    reasoning = message.get("reasoning_content") or thoughts.removeprefix("<think>")
    if reasoning.strip() in written:
        return
    # Thoughts of earlier turns are left out when the model is used, too.
    as_last = turns.prompts.text(number + 1) or ""
    if reasoning.strip() not in as_last:
        yield NO_REASONING


def _short(text: str, most: int = 60) -> str:
    shown = repr(text)
    return shown if len(shown) <= most else f"{shown[:most]}…"
