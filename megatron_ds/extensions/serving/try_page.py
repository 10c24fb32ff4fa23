"""The page at /, to try a model in a browser: a chat where there is a template, else continuations.

`try_page.html` has its text; it is one file without references to others.
"""

import json
from functools import cache
from html import escape
from pathlib import Path

from .served_model import ServedModel


@cache
def _text() -> str:
    return Path(__file__).with_name("try_page.html").read_text(encoding="utf-8")


def page(model: ServedModel) -> str:
    """Return the page for a model."""
    facts = {
        "name": model.name,
        "max_length": model.max_length,
        "chat": model.template is not None,
    }
    # Within <script> a "<" would end it.
    shown = json.dumps(facts).replace("<", "\\u003c")
    return _text().replace("{{model}}", shown).replace("{{name}}", escape(model.name))
