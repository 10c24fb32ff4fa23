"""`RequestFields`: the fields of a request that have an effect, as a model of pydantic. Each endpoint has one.

A field that is null is absent. Keys that neither the model nor its `harmless` ones have are refused, as OpenAI does: a
misspelt one would silently have no effect.
"""

import json
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from ...console import shortened
from ...registry import did_you_mean
from .accepted_fields import Harmless
from .refused_request import RefusedRequest
from .request_body import check_structure

Values = dict[str, Any]
# In messages: what a field of a type must be, where it has no description.
WORDS: dict[Any, str] = {
    bool: "true or false",
    bool | None: "true or false",
    str | None: "a string",
    dict[str, Any]: "an object",
}


class RequestFields(BaseModel):
    """The values of a request, checked by their types and bounds, which do not convert a value.

    harmless  further keys that may be given, without an effect
    """

    model_config = ConfigDict(strict=True, allow_inf_nan=False)
    harmless: ClassVar[Mapping[str, Harmless]] = {}

    @classmethod
    def read(cls, body: Values) -> Self:
        """Return the values of a body. Raises RefusedRequest."""
        given = {name: value for name, value in body.items() if value is not None}
        for name, value in given.items():
            if name in cls.harmless:
                cls.harmless[name].check(name, value)
            elif name not in cls.model_fields:
                raise cls._unknown(name)
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            problem = error.errors(include_url=False, include_context=False)[0]
        raise cls._wrong(str(problem["loc"][0]), given)

    @classmethod
    def _unknown(cls, name: str) -> RefusedRequest:
        shown = shortened(name, 60)
        hint = did_you_mean(name[:60], [*cls.model_fields, *cls.harmless]) or "."
        return RefusedRequest(
            f"unknown field {shown!r}{hint}", shown, code="unknown_parameter"
        )

    @classmethod
    def _wrong(cls, name: str, given: Values) -> RefusedRequest:
        if name not in given:
            return RefusedRequest(f"the body has no {name!r}.", name)
        field = cls.model_fields[name]
        words = field.description or WORDS[field.annotation]
        shown = shortened(json.dumps(given[name]), 80)
        return RefusedRequest(f"{name} is {shown}; it must be {words}.", name)


def integer(default: int | None, least: int, most: int) -> Any:
    """Return a field for the integers of a range, both ends included."""
    words = f"an integer; the range is {least:,} to {most:,}"
    return Field(default, ge=least, le=most, description=words)


def number(default: float, least: float, most: float) -> Any:
    """Return a field for the numbers of a range, both ends included."""
    words = f"a finite number; the range is {least:,} to {most:,}"
    return Field(default, ge=least, le=most, description=words)


def read_json(body: bytes) -> Values:
    """Return the object in a body. Raises RefusedRequest."""
    check_structure(body)
    try:
        content = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise RefusedRequest(f"the body is not JSON in UTF-8: {error}.") from None
    if not isinstance(content, dict):
        raise RefusedRequest(
            f"the body is a JSON {type(content).__name__}; it must be an object."
        )
    return content
