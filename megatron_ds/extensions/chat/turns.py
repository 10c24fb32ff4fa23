"""`Turns`: where a model begins to write an answer, and where its turn ends.

A model continues the generation prompt, so its answer is what follows that prompt in the text. Its turn ends where
the header of a further answer would begin, which is where the next turn begins.

    …user\nWhy?<end>\nassistant\n                              prompt of the answer
    …user\nWhy?<end>\nassistant\nBecause.<end>\nassistant\n    prompt of a further one: the same header ends it
    …user\nWhy?<end>\nassistant\nBecause.<end>\nuser\n…        the text
    |         given            | written     |

A template may print earlier messages in another way once there are later ones: it drops thoughts and moves lists of
tools. Then the end of the prompt is searched for between the messages around the answer.
"""

import os
from collections.abc import Iterator
from typing import NamedTuple

from .content_exchange import AnswerNotFound, Exchanges
from .conversation import Conversation, Message, text_of
from .template import ChatTemplate
from .turn_prompts import TurnPrompts, usual_end

THOUGHTS_END = "</think>"
SHORT = 8  # characters of an end that are searched for
REACH = 20000  # characters that are compared before a place


class Edge(NamedTuple):
    """A place in the text. is_sure: it follows from the prompts of the template, not only from a content."""

    at: int
    is_sure: bool = True


class Turns:
    """The turns of the assistant in the text of a conversation."""

    def __init__(self, template: ChatTemplate, conversation: Conversation, text: str):
        self.template = template
        self.messages = conversation.messages
        self.tools = conversation.tools
        self.text = text
        self.prompts = TurnPrompts(template, self.messages, self.tools)
        render = lambda messages: template.render(messages, self.tools)
        self.exchanges = Exchanges(render, text, self.messages)

    def begin(self, number: int) -> Edge:
        """Find where the model begins to write a message. Raises AnswerNotFound."""
        prompt = self.prompts.prompt(number)
        if prompt is not None and self.text.startswith(prompt):
            return Edge(len(prompt))
        # The template prints earlier messages in another way.
        end = self._end_of_prompt(number, prompt)
        if end is not None:
            return Edge(end)
        # The prompt may open thoughts that are not in the text.
        start = self.exchanges.place(number)[0]
        part = self._part_of_prompt(number, prompt, start)
        if part is not None:
            return Edge(part)
        return Edge(start, False)

    def end(self, number: int, begin: int) -> Edge:
        """Find where the turn of a message ends, before the white space after it. Raises AnswerNotFound."""
        stop, is_sure = self._end(number, begin)
        written = self.text[begin:stop]
        kept = written.rstrip()
        # The white space at the end of an answer is its own.
        content = text_of(self.messages[number])
        bare = content.rstrip()
        if bare and kept.endswith(bare):
            own = content[len(bare) :]
            behind = written[len(kept) :]
            kept += os.path.commonprefix([own, behind])
        return Edge(begin + len(kept), is_sure)

    def has_end(self, number: int, begin: int, stop: int) -> bool:
        """Return whether the template prints something after the answer that belongs to its turn."""
        message = self.messages[number]
        content = text_of(message).strip()
        if content and not message.get("tool_calls"):
            written = self.text[begin:stop].rstrip()
            return not written.endswith(content)
        # Calls may be printed in any way.
        return bool(usual_end(self.template).strip())

    def _end(self, number: int, begin: int) -> Edge:
        is_last = number == len(self.messages) - 1
        closed = self.prompts.closed(number)
        # Usually the text begins with what a further answer would follow.
        if closed is not None and self.text.startswith(closed):
            stop = len(closed)
            # A template without ends of turns may give the text one.
            if is_last and stop >= begin and not self.has_end(number, begin, stop):
                stop = len(self.text)
            if stop >= begin:
                return Edge(stop)
        # The last turn may end in another way than others.
        if is_last:
            return Edge(len(self.text))
        # Earlier messages, or thoughts of this one, are printed in another way.
        shared = self._shared_end(number, begin, closed)
        if shared is not None:
            return Edge(shared)
        return self._end_by_exchange(number, closed)

    def _shared_end(self, number: int, begin: int, closed: str | None) -> int | None:
        """Find the end of the conversation that ends with this message, with its content and calls, in the text.

        Only one of the two texts may have the thoughts before them.
        """
        if closed is None:
            return None
        # Between the beginning of this message and the next one.
        high = self._start_of(number + 1)
        if high is None:
            high = len(self.text)
        places = _ends_of(closed[-SHORT:], self.text, begin, high)
        best, common = _most_alike(places, self.text, begin, closed)
        # All of the answer must be before it.
        for part in parts_of(self.messages[number]):
            if part not in common:
                return None
        return best

    def _end_by_exchange(self, number: int, closed: str | None) -> Edge:
        """Find the end of a content, and of what follows it in the conversation that ends with this message."""
        stop = self.exchanges.place(number)[1]
        following = self._start_of(number + 1)
        if following is not None and following < stop:
            raise AnswerNotFound(
                f"message {number} cannot be separated from the one after, which the template prints before its end"
            )
        # What follows is known if the content occurs there.
        content = text_of(self.messages[number]).strip()
        if closed is None or not content:
            return Edge(stop, False)
        _, found, usual = closed.rpartition(content)
        if not found or not self.text.startswith(usual, stop):
            return Edge(stop, False)
        return Edge(stop + len(usual))

    def _end_of_prompt(self, number: int, prompt: str | None) -> int | None:
        """Find the end of the prompt in the text, between the messages before and after this one."""
        header = self.prompts.header(number)
        low = self._stop_of(number - 1)
        if low is None:
            return None
        # The content of the answer comes after its header.
        high = self._start_of(number)
        if high is None:
            high = self._start_of(number + 1)
        if high is None:
            high = len(self.text)
        # Several places may have the header: the text before the right one is most like the prompt.
        places = _ends_of(header, self.text, low, high)
        best, common = _most_alike(places, self.text, 0, prompt or header)
        if not common.strip():
            return None
        return best

    def _part_of_prompt(
        self, number: int, prompt: str | None, start: int
    ) -> int | None:
        """Find where the text, which has only a part of the header, leaves the prompt; at most at `start`."""
        own = self.prompts.text(number)
        header = self.prompts.header(number)
        # Less than a half of the header may be the beginning of another token.
        least = len(header) // 2 + 1
        # Text and prompt may agree up to the header.
        if prompt is not None and own is not None and prompt.startswith(own):
            common = os.path.commonprefix([prompt, self.text[:start]])
            if len(common) >= len(own) + least:
                return len(common)
        # Otherwise the header begins between the message before and the content.
        low = self._stop_of(number - 1) or 0
        for length in range(len(header), least - 1, -1):
            at = self.text.find(header[:length], low, start)
            if at >= 0:
                return at + length
        return None

    def _start_of(self, number: int) -> int | None:
        """Return where the content of a message begins; None if it has no place of its own."""
        place = self.exchanges.place_if_any(number)
        if place is None:
            return None
        return place[0]

    def _stop_of(self, number: int) -> int | None:
        """Return where the content of a message ends; 0 before the first one, None if it has no place of its own."""
        if number < 0:
            return 0
        place = self.exchanges.place_if_any(number)
        if place is None:
            return None
        return place[1]


def parts_of(message: Message) -> list[str]:
    """Return the parts of an answer that every template prints unchanged.

    These are names of functions and of their arguments, or without calls the content after the thoughts.
    """
    calls = message.get("tool_calls", ())
    if not calls:
        said = text_of(message).rpartition(THOUGHTS_END)[2]
        return [said.strip()]
    # Templates print values of arguments in many ways.
    parts = []
    for call in calls:
        function = call["function"]
        parts.append(function["name"])
        if isinstance(function["arguments"], dict):
            parts.extend(function["arguments"])
    return parts


def _ends_of(part: str, text: str, low: int, high: int) -> Iterator[int]:
    """Yield the places between two others where the text before ends with a part."""
    at = text.find(part, low, high)
    while at >= 0:
        yield at + len(part)
        at = text.find(part, at + 1, high)


def _most_alike(
    places: Iterator[int], text: str, begin: int, other: str
) -> tuple[int | None, str]:
    """Find the place before which a text, from `begin` on, has the longest end in common with another; and that end."""
    best = None
    longest = ""
    for place in places:
        common = _common_end(text[begin:place], other)
        if best is None or len(common) > len(longest):
            best = place
            longest = common
    return best, longest


def _common_end(one: str, other: str) -> str:
    """Return the end that both texts have in common, up to `REACH` characters."""
    reversed_ends = [one[-REACH:][::-1], other[-REACH:][::-1]]
    return os.path.commonprefix(reversed_ends)[::-1]
