"""`need(...)` is the condition under which an option has an effect, declared beside the option.

    yarn_beta_fast: float = option(32.0, needs=need("model.position_embedding_type", "yarn"), help="…")

One rule checks all of them (rules/need.py), and docs/reference/flags.md has them in a column.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

OFF = (None, False, 0, "none", ())


@dataclass(frozen=True)
class Need:
    """Other options, one of which gives an option its effect.

    choices  pairs of the path of an option and the values of it that do; without values, every value that
             turns the option on
    """

    choices: tuple[tuple[str, tuple], ...]

    def __or__(self, other: Need) -> Need:
        return Need(self.choices + other.choices)


def need(path: str, *values: Any) -> Need:
    """Need the option `path` to have one of these values; without values, to be turned on."""
    return Need(((path, values),))


def holds(value: Any, values: tuple) -> bool:
    """Return whether the value of an option, or an item of its list, is one that `need` asks for."""
    if not values:
        return value not in OFF
    items = value if isinstance(value, tuple) else (value,)
    return any(item in values for item in items)
