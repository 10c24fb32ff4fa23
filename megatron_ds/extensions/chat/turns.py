"""`Turns`: where a model begins to write an answer, and where its turn ends.

A model continues the generation prompt, so its answer is what follows that prompt in the text. Its turn ends where
the prompt of a further answer would begin, which is what the next turn begins with.

    …user\nWhy?<end>\nassistant\n                              prompt of the answer
    …user\nWhy?<end>\nassistant\nBecause.<end>\nassistant\n    prompt of a further one: the same header ends it
    …user\nWhy?<end>\nassistant\nBecause.<end>\nuser\n…        the text
    |         given            | written     |

A template may print earlier messages in another way once there are later ones: it drops thoughts and moves lists of
tools. Then the end of the prompt is searched for between the messages around the answer.
"""

import os
from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

from .conversation import Conversation, Message, text_of
from .exchange import STAND_INS, AnswerNotFound, Exchanges
from .template import ChatTemplate, TemplateRefusal

THOUGHTS_END = "</think>"
SHORT = 8  # characters of an end that are searched for
REACH = 20000  # characters that are compared before a place


class Edge(NamedTuple):
    """A place in the text. is_sure: it is what the template's prompts define, and not only the edge of a content."""

    at: int
    is_sure: bool = True


class Turns:
    """The turns of the assistant in the text of a conversation."""

    def __init__(self, template: ChatTemplate, conversation: Conversation, text: str):
        self.template = template
        self.messages = conversation.messages
        self.tools = conversation.tools
        self.text = text
        render = lambda messages: template.render(messages, self.tools)
        self.exchanges = Exchanges(render, text, self.messages)
        self._rendered: dict[tuple[int, bool], str | None] = {}

    def begin(self, number: int) -> Edge:
        """Where the model begins to write a message. Raises AnswerNotFound."""
        prompt = self._first(number, True)
        if prompt is not None and self.text.startswith(prompt):
            return Edge(len(prompt))
        aligned = self._end_of_prompt(number, prompt)
        if aligned is not None:
            return Edge(aligned)
        # The prompt may open thoughts that the text has not.
        start = self.exchanges.place(number)[0]
        common = self._part_of_prompt(number, prompt, start)
        if common is not None:
            return Edge(common)
        return Edge(start, False)

    def end(self, number: int, begin: int) -> Edge:
        """Where the turn of a message ends, before the white space behind it. Raises AnswerNotFound."""
        stop, is_sure = self._end(number, begin)
        written = self.text[begin:stop]
        kept = written.rstrip()
        # The white space at the end of an answer is its own.
        content = text_of(self.messages[number])
        if content.strip() and kept.endswith(content.rstrip()):
            own = content[len(content.rstrip()) :]
            kept += os.path.commonprefix([own, written[len(kept) :]])
        return Edge(begin + len(kept), is_sure)

    def has_end(self, number: int, begin: int, stop: int) -> bool:
        """Whether the template prints something behind the answer, in its turn."""
        message = self.messages[number]
        content = text_of(message).strip()
        if content and not message.get("tool_calls"):
            return not self.text[begin:stop].rstrip().endswith(content)
        return bool(self._usual_end.strip())

    def _end(self, number: int, begin: int) -> Edge:
        is_last = number == len(self.messages) - 1
        closed = self._closed(number)
        if closed is not None and len(closed) >= begin:
            if self.text.startswith(closed):
                # A template without ends of turns may give the text one.
                is_open = is_last and not self.has_end(number, begin, len(closed))
                return Edge(len(self.text) if is_open else len(closed))
        if is_last:
            return Edge(len(self.text))
        shared = self._shared_end(number, begin, closed)
        if shared is not None:
            return Edge(shared)
        return self._end_by_exchange(number, closed)

    def _shared_end(self, number: int, begin: int, closed: str | None) -> int | None:
        """Where the text has the end of the conversation that ends with this message, with its content and calls.

        Thoughts before them may be printed in one of the two alone.
        """
        if closed is None:
            return None
        after = self.exchanges.place_if_any(number + 1)
        high = len(self.text) if after is None else after[0]
        places = _ends_of(closed[-SHORT:], self.text, begin, high)
        shared = lambda stop: _common_end(self.text[begin:stop], closed)
        best = max(places, key=shared, default=None)
        if best is None:
            return None
        common = self.text[best - shared(best) : best]
        has_all = all(part in common for part in parts_of(self.messages[number]))
        return best if has_all else None

    def _end_by_exchange(self, number: int, closed: str | None) -> Edge:
        """The end of a content, and what follows it in the conversation that ends with this message."""
        stop = self.exchanges.place(number)[1]
        after = self.exchanges.place_if_any(number + 1)
        if after and after[0] < stop:
            raise AnswerNotFound(
                f"message {number} cannot be separated from the one after, which the template prints before its end"
            )
        content = text_of(self.messages[number]).strip()
        if closed is None or not content or content not in closed:
            return Edge(stop, False)
        usual = closed.rpartition(content)[2]
        is_same = self.text.startswith(usual, stop)
        return Edge(stop + len(usual), True) if is_same else Edge(stop, False)

    def _closed(self, number: int) -> str | None:
        """The conversation that ends with a message, as it is before a further turn; None if it has no prompt."""
        prompt = self._first(number + 1, True)
        if prompt is None:
            return self._first(number + 1, False)
        header = self._header(number)
        if header and prompt.endswith(header):
            return prompt.removesuffix(header)
        own = self._first(number + 1, False)
        if own is not None and prompt.startswith(own):
            return own
        return prompt

    def _end_of_prompt(self, number: int, prompt: str | None) -> int | None:
        """Where the text has the end of the prompt, between the messages before and after this one."""
        header = self._header(number)
        prompt = prompt or header
        before = self.exchanges.place_if_any(number - 1)
        if not prompt.strip() or (before is None and number > 0):
            return None
        # The content of the answer comes behind its header.
        low = before[1] if before else 0
        own = self.exchanges.place_if_any(number)
        after = own or self.exchanges.place_if_any(number + 1)
        high = after[0] if after else len(self.text)
        # Of all places that have the header, the one whose text before is the prompt's.
        places = _ends_of(header, self.text, low, high)
        shared = lambda stop: _common_end(self.text[:stop], prompt)
        best = max(places, key=shared, default=None)
        if best is None or not prompt[len(prompt) - shared(best) :].strip():
            return None
        return best

    def _part_of_prompt(
        self, number: int, prompt: str | None, start: int
    ) -> int | None:
        """Where the text, which has a part of the header alone, leaves the prompt; at most at `start`."""
        own = self._first(number, False)
        header = self._header(number)
        # More than a half of it: less may be the beginning of another token.
        least = len(header) // 2 + 1
        if prompt is not None and own is not None and prompt.startswith(own):
            common = len(os.path.commonprefix([prompt, self.text[:start]]))
            if common >= len(own) + least:
                return common
        # Or the text has the first part of the header, between the message before and the content.
        before = self.exchanges.place_if_any(number - 1)
        low = before[1] if before else 0
        for length in range(len(header), least - 1, -1):
            at = self.text.find(header[:length], low, start)
            if at >= 0:
                return at + length
        return None

    def _header(self, number: int) -> str:
        """What the prompt adds to the messages before an answer."""
        return self._added(number) or self._usual_header

    def _added(self, number: int) -> str:
        prompt = self._first(number, True)
        own = self._first(number, False)
        if prompt is None or own is None or not prompt.startswith(own):
            return ""
        return prompt.removeprefix(own)

    @cached_property
    def _usual_header(self) -> str:
        """The header of the first answer that has one, else that of the answer to a single question."""
        for number, message in enumerate(self.messages):
            if message["role"] == "assistant" and (added := self._added(number)):
                return added
        # A template may end every text, so that no prompt continues one.
        bare = _rendered(self.template, (), self.tools, True) or ""
        prompt = _rendered(self.template, opening(self.template), None, True) or ""
        return bare if prompt.endswith(bare) else ""

    @cached_property
    def _usual_end(self) -> str:
        """What ends the answer to a single question."""
        return usual_end(self.template)

    def _first(self, count: int, is_prompt: bool) -> str | None:
        """The text of the first messages; with is_prompt the prompt behind them. None if the template refuses."""
        key = (count, is_prompt)
        if key not in self._rendered:
            messages = self.messages[:count]
            self._rendered[key] = _rendered(
                self.template, messages, self.tools, is_prompt
            )
        return self._rendered[key]


def opening(template: ChatTemplate) -> list[Message]:
    """A question, after a system message if the template requires one; empty if it takes neither."""
    system = {"role": "system", "content": STAND_INS[0]}
    question = {"role": "user", "content": STAND_INS[0]}
    for messages in ([question], [system, question]):
        if _rendered(template, messages, None, False) is not None:
            return messages
    return []


def usual_end(template: ChatTemplate) -> str:
    """What a template writes behind the answer to a question, in a conversation that goes on."""
    question = opening(template)
    answer = {"role": "assistant", "content": STAND_INS[1]}
    messages = (*question, answer)
    text = _rendered(template, messages, None, False)
    if not question or text is None or STAND_INS[1] not in text:
        return ""
    conversation = Conversation(messages, None, (False,) * len(question) + (True,))
    turns = Turns(template, conversation, text)
    begin = text.rindex(STAND_INS[1])
    stop = turns.end(len(question), begin).at
    return text[begin:stop].removeprefix(STAND_INS[1])


def _rendered(template: ChatTemplate, messages, tools, is_prompt: bool) -> str | None:
    render = template.render_prompt if is_prompt else template.render
    try:
        return render(messages, tools)
    except TemplateRefusal:
        return None


def parts_of(message: Message) -> list[str]:
    """What every template prints of an answer as it is: names of functions and of their arguments; of an answer
    without calls the content, behind its thoughts."""
    calls = [call["function"] for call in message.get("tool_calls", ())]
    if not calls:
        return [text_of(message).rpartition(THOUGHTS_END)[2].strip()]
    parts = []
    for function in calls:
        parts.append(function["name"])
        if isinstance(function["arguments"], dict):
            parts.extend(function["arguments"])
    return parts


def _ends_of(part: str, text: str, low: int, high: int) -> Iterator[int]:
    """The places between two at which the text before ends with a part."""
    at = text.find(part, low, high)
    while at >= 0:
        yield at + len(part)
        at = text.find(part, at + 1, high)


def _common_end(one: str, other: str) -> int:
    """The number of characters at the end of both, up to `REACH`."""
    pair = [one[-REACH:][::-1], other[-REACH:][::-1]]
    return len(os.path.commonprefix(pair))
