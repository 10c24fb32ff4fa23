"""`ChatTemplate`: the Jinja template that turns a conversation into text, in a sandbox.

Templates are programs of other people. transformers renders them in an environment of jinja2 that can neither
call Python nor change what it is given, in a process with limits (`bounded_renderer`).
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import DataError
from ...host.regular_file import read_regular
from ..tokenizers.special_tokens import read_json_text, special_tokens
from .bounded_renderer import render_bounded
from .conversation import Message

CONFIG = "tokenizer_config.json"
FILE = "chat_template.jinja"
MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
MOST_BYTES = 4 << 20  # of a template; published ones have some ten thousand
Span = tuple[int, int]


class TemplateRefusal(ValueError):
    """A template cannot render some messages. The message has its reason."""


@dataclass(frozen=True)
class ChatTemplate:
    """A template and the names that it may use.

    source   the text of the template
    values   names with values: special tokens, and arguments such as {"enable_thinking": False}
    """

    source: str
    values: Mapping[str, Any] = field(default_factory=dict)

    @property
    def marks_answers(self) -> bool:
        """Whether the template has {% generation %} around what the assistant writes."""
        return bool(MARKS.search(self.source))

    @property
    def fingerprint(self) -> str:
        """A hash of everything that decides the text."""
        text = json.dumps([self.source, dict(self.values)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def check(self) -> None:
        """Raises DataError if no messages can be rendered."""
        try:
            self.render([{"role": "user", "content": "?"}])
        except TemplateRefusal:
            pass  # the template does not take these messages

    def render(
        self, messages: Sequence[Message], tools: Sequence[dict] | None = None
    ) -> str:
        """Return the text of a conversation. Raises TemplateRefusal."""
        return self._render(messages, tools)[0]

    def render_prompt(
        self, messages: Sequence[Message], tools: Sequence[dict] | None = None
    ) -> str:
        """Return the text of a conversation, and the beginning of the next answer. Raises TemplateRefusal."""
        return self._render(messages, tools, add_generation_prompt=True)[0]

    def render_marked(
        self, messages: Sequence[Message], tools: Sequence[dict] | None = None
    ) -> tuple[str, list[Span]]:
        """Return the text, and the spans of it that the template marks as answers. Raises TemplateRefusal."""
        return self._render(messages, tools, return_assistant_tokens_mask=True)

    def _render(
        self, messages: Sequence[Message], tools: Sequence[dict] | None, **wanted: bool
    ) -> tuple[str, list[Span]]:
        arguments = {
            "tools": list(tools) if tools else None,
            "chat_template": self.source,
            **wanted,
        }
        # A request must not replace the template by a value of this name.
        taken = sorted(arguments.keys() & self.values.keys())
        if taken:
            raise TemplateRefusal(f"{taken[0]!r} is not a value that a template takes")
        reply = render_bounded(list(messages), {**self.values, **arguments})
        if "syntax" in reply:
            raise DataError(
                f"the chat template is no template of Jinja, line {reply['line']}: {reply['syntax']}. Correct it, or "
                "give another one with --chat-template FILE."
            )
        if "refusal" in reply:
            raise TemplateRefusal(reply["refusal"])
        return reply["text"], [(start, stop) for start, stop in reply["spans"]]


def load_template(
    tokenizer: str, path: str | None, arguments: Mapping[str, Any]
) -> ChatTemplate:
    """`find_template`. Raises DataError without a template."""
    found = find_template(tokenizer, path, arguments)
    if found is None:
        raise DataError(
            f"--tokenizer-model {tokenizer} has no chat template: neither {FILE} nor chat_template "
            f"in {CONFIG}. Give one with --chat-template FILE."
        )
    return found


def find_template(
    tokenizer: str, path: str | None, arguments: Mapping[str, Any]
) -> ChatTemplate | None:
    """Return the template in the file `path`, else the one beside a tokenizer, None if that has none.

    tokenizer: --tokenizer-model, a file or a folder. Its files name the special tokens.
    arguments: values that the template takes besides.  Raises DataError for a file that cannot be read.
    """
    folder = Path(tokenizer)
    if not folder.is_dir():
        folder = folder.parent
    source: str | None
    if path is not None:
        source = _read(Path(path))
    elif (folder / FILE).is_file():
        source = _read(folder / FILE)
    else:
        source = _in_config(folder / CONFIG)
    if source is None:
        return None
    return ChatTemplate(source, {**special_tokens(folder), **arguments})


def _read(path: Path) -> str:
    try:
        return read_regular(path, DataError, MOST_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"the chat template {path} cannot be read: {error}.") from None


def _in_config(path: Path) -> str | None:
    """Return the template in tokenizer_config.json; of several the one named "default"."""
    if not path.is_file():
        return None
    content = read_json_text(path, str(path))
    found = content.get("chat_template") if isinstance(content, dict) else None
    if isinstance(found, list):
        tables = [entry for entry in found if isinstance(entry, dict)]
        named = {entry.get("name"): entry.get("template") for entry in tables}
        found = named.get("default")
    if found is not None and not isinstance(found, str):
        raise DataError(f"{path}: chat_template is no text and has no default.")
    return found
