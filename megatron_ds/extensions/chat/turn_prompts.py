"""`TurnPrompts`: what a model is given before each message of a conversation, and the header that ends it.

…user\nWhy?<end>\n                    the messages before an answer
…user\nWhy?<end>\nassistant\n         their prompt
                  |  header |
"""

from collections.abc import Sequence
from functools import cached_property

from .content_exchange import STAND_INS
from .conversation import Message
from .template import ChatTemplate, TemplateRefusal


class TurnPrompts:
    """The beginnings of a conversation as the template renders them, each of them once."""

    def __init__(
        self,
        template: ChatTemplate,
        messages: Sequence[Message],
        tools: Sequence[dict] | None,
    ):
        self.template = template
        self.messages = messages
        self.tools = tools
        self._texts: dict[int, str | None] = {}
        self._prompts: dict[int, str | None] = {}

    def text(self, count: int) -> str | None:
        """Return the first messages; None if the template refuses them."""
        if count not in self._texts:
            messages = self.messages[:count]
            self._texts[count] = rendered(self.template, messages, self.tools)
        return self._texts[count]

    def prompt(self, count: int) -> str | None:
        """Return the prompt after the first messages; None if the template refuses them."""
        if count not in self._prompts:
            messages = self.messages[:count]
            self._prompts[count] = prompt_of(self.template, messages, self.tools)
        return self._prompts[count]

    def header(self, number: int) -> str:
        """Return the text that the prompt adds to the messages before an answer."""
        return self._added(number) or self._usual_header

    def closed(self, number: int) -> str | None:
        """Return the text up to the end of a message, as it is printed when another turn follows."""
        prompt = self.prompt(number + 1)
        if prompt is None:
            return self.text(number + 1)
        # A further answer has a prompt that ends with a header.
        header = self.header(number)
        if header and prompt.endswith(header):
            return prompt.removesuffix(header)
        own = self.text(number + 1)
        if own is not None and prompt.startswith(own):
            return own
        return prompt

    def _added(self, number: int) -> str:
        prompt = self.prompt(number)
        own = self.text(number)
        if prompt is None or own is None:
            return ""
        if not prompt.startswith(own):
            return ""
        return prompt.removeprefix(own)

    @cached_property
    def _usual_header(self) -> str:
        """The header of the first answer that has one, else that of a prompt without messages."""
        for number, message in enumerate(self.messages):
            if message["role"] != "assistant":
                continue
            added = self._added(number)
            if added:
                return added
        # A template may end every text, so that no prompt continues one.
        bare = prompt_of(self.template, (), self.tools) or ""
        prompt = prompt_of(self.template, opening(self.template), None) or ""
        if prompt.endswith(bare):
            return bare
        return ""


def rendered(
    template: ChatTemplate,
    messages: Sequence[Message],
    tools: Sequence[dict] | None = None,
) -> str | None:
    """Return the text of messages; None if the template refuses them."""
    try:
        return template.render(messages, tools)
    except TemplateRefusal:
        return None


def prompt_of(
    template: ChatTemplate,
    messages: Sequence[Message],
    tools: Sequence[dict] | None = None,
) -> str | None:
    """Return the prompt after messages; None if the template refuses them."""
    try:
        return template.render_prompt(messages, tools)
    except TemplateRefusal:
        return None


def opening(template: ChatTemplate) -> list[Message]:
    """Return a question, after a system message if the template requires one; empty if it takes neither."""
    system = {"role": "system", "content": STAND_INS[0]}
    question = {"role": "user", "content": STAND_INS[0]}
    # Templates refuse some forms.
    for messages in ([question], [system, question]):
        if rendered(template, messages) is not None:
            return messages
    return []


def usual_end(template: ChatTemplate) -> str:
    """Return what a template writes after the answer to a question in a conversation that goes on."""
    question = opening(template)
    if not question:
        return ""
    answer = {"role": "assistant", "content": STAND_INS[1]}
    prompts = TurnPrompts(template, [*question, answer], None)
    closed = prompts.closed(len(question)) or ""
    whole = prompts.text(len(question) + 1) or ""
    # A template without ends of turns may end the text.
    for text in (closed, whole):
        end = text.rpartition(STAND_INS[1])[2]
        if end.strip():
            return end
    return ""
