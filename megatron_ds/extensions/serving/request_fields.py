"""`RequestField`: the values that one key of a request may have. A table of them is checked by `read_fields`.

Keys that no table has are refused, as OpenAI does: a misspelt one would silently have no effect. With null they ask for
nothing.
"""

import json
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from ...console import shortened
from ...registry import did_you_mean
from .refused_request import RefusedRequest
from .request_body import check_structure

logger = logging.getLogger(__name__)
Fields = Mapping[str, "RequestField"]
Values = dict[str, Any]


@dataclass(frozen=True)
class RequestField:
    """One key of the body.

    kind     a name of KINDS
    default  the value where the key is absent or null
    least    of numbers, and of the length of lists
    most     the same
    only     all values that are supported; None without such a limit
    reason   a sentence for the message about other values
    nothing  values that mean the default
    note     why the field has no effect, which is logged once; "" for a field with an effect
    """

    kind: str
    default: Any = None
    least: float = -math.inf
    most: float = math.inf
    only: tuple | None = None
    reason: str = ""
    nothing: tuple = ()
    note: str = ""

    def read(self, name: str, value: Any) -> Any:
        """Return the value, or the default for null. Raises RefusedRequest."""
        if value is None or value in self.nothing:
            return self.default
        if self.note:
            _log_once(name, self.note)
        fits, words = KINDS[self.kind]
        if not fits(value):
            raise RefusedRequest(
                f"{name} is {_shown(value)}; it must be {words}.", name
            )
        if self.only is not None and value not in self.only:
            raise RefusedRequest(
                f"{name} {_shown(value)} is not supported. {self.reason}",
                name,
                code="unsupported_value",
            )
        size = value if self.kind in NUMBERS else _length(value)
        if not self.least <= size <= self.most:
            what = _shown(value) if self.kind in NUMBERS else f"of length {size}"
            raise RefusedRequest(
                f"{name} is {what}; the range is {_range(self)}.", name
            )
        return value


NUMBERS = ("integer", "number")


def _is_integer(value: Any) -> bool:
    return type(value) is int


def _is_number(value: Any) -> bool:
    return _is_integer(value) or type(value) is float and math.isfinite(value)


def is_text(value: Any) -> bool:
    """Return whether this is a text that UTF-8 can hold: JSON may have half a surrogate pair."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_texts(value: Any) -> bool:
    return is_text(value) or isinstance(value, list) and all(map(is_text, value))


def is_integers(value: Any) -> bool:
    """Return whether this is a list of integers."""
    return isinstance(value, list) and all(map(_is_integer, value))


def _is_prompts(value: Any) -> bool:
    if _is_texts(value) or is_integers(value):
        return True
    return isinstance(value, list) and all(map(is_integers, value))


# kind → (whether a value is of it, its name in messages)
KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "integer": (_is_integer, "an integer"),
    "number": (_is_number, "a finite number"),
    "boolean": (lambda value: isinstance(value, bool), "true or false"),
    "text": (is_text, "a string of valid characters"),
    "texts": (_is_texts, "a string or a list of strings"),
    "list": (lambda value: isinstance(value, list), "a list"),
    "list of strings": (
        lambda value: isinstance(value, list) and all(map(is_text, value)),
        "a list of strings",
    ),
    "integers": (is_integers, "a list of integers"),
    "prompts": (
        _is_prompts,
        "a string, a list of strings, a list of token ids, or a list of such lists",
    ),
    "object": (lambda value: isinstance(value, dict), "an object"),
    "any": (lambda value: True, "any value"),
}
IGNORED = RequestField("any")


@cache
def _log_once(name: str, note: str) -> None:
    logger.warning("the field %s of a request has no effect: %s", name, note)


def _shown(value: Any) -> str:
    try:
        return shortened(json.dumps(value), 80)
    except RecursionError:
        return f"a deeply nested {type(value).__name__}"


def _length(value: Any) -> int:
    return len(value) if isinstance(value, list) else 0


def _range(field: RequestField) -> str:
    if field.most == math.inf:
        return f"{field.least:,} or more"
    return f"{field.least:,} to {field.most:,}"


def read_json(body: bytes) -> Values:
    """Return the object in a body. Raises RefusedRequest."""
    check_structure(body)
    try:
        content = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        reason = "nested too deep" if isinstance(error, RecursionError) else error
        raise RefusedRequest(f"the body is not JSON in UTF-8: {reason}.") from None
    if not isinstance(content, dict):
        raise RefusedRequest(
            f"the body is a JSON {type(content).__name__}; it must be an object."
        )
    return content


def _refuse_constant(word: str) -> None:
    raise ValueError(f"{word} is no number of JSON")


def read_fields(body: Values, fields: Fields, required: str) -> Values:
    """Return the value of each field. required: the key without which there is nothing to do. Raises
    RefusedRequest.
    """
    for name, value in body.items():
        if name not in fields and value is not None:
            shown = shortened(name, 60)
            hint = did_you_mean(name[:60], [*fields]) or "."
            raise RefusedRequest(
                f"unknown field {shown!r}{hint}", shown, code="unknown_parameter"
            )
    if body.get(required) is None:
        raise RefusedRequest(f"the body has no {required!r}.", required)
    return {
        name: field.read(name, body.get(name, None)) for name, field in fields.items()
    }
