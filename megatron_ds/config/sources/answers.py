"""`Answer`: what a flag or key gets that has no option here, and `table`, which writes many of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

# Values that mean "off". DeepSpeed replaces "auto" by the default, which is off for all refused keys.
OFF = (False, None, "auto")


@dataclass(frozen=True)
class Answer:
    """Which values of a flag or key are accepted.

    note     why an accepted value changes nothing
    refusal  why another value is refused, and what to do
    values   the accepted values; None: all
    """

    note: str = ""
    refusal: str = ""
    values: tuple[Any, ...] | None = None

    def accepts(self, value: Any) -> bool:
        """Return whether the value is accepted. value: of the flag as a string, or of the key."""
        if self.values is None:
            return True
        if isinstance(value, dict):
            # Without False among the values, a block is on wherever it stands.
            has_off = any(known is False for known in self.values)
            return has_off and asks_for_nothing(value)
        return any(
            type(value) is type(known) and value == known for known in self.values
        )


def asks_for_nothing(value: Any) -> bool:
    """Return whether a value switches a feature off; a block does by its "enabled", or else by all its values."""
    if isinstance(value, dict):
        return (
            value["enabled"] in OFF
            if "enabled" in value
            else all(map(asks_for_nothing, value.values()))
        )
    return value in OFF or value in (0, "", [])


def table(
    accepted: Mapping[str, str], refused: Mapping[str, str], only: Mapping[str, Answer]
) -> Mapping[str, Answer]:
    """name → answer.

    accepted  why every value is accepted → the names, between spaces
    refused   why only values that mean "off" are accepted → the names
    only      the names with answers of their own
    """
    answers: dict[str, Answer] = {}
    for note, names in accepted.items():
        answers |= dict.fromkeys(names.split(), Answer(note))
    for why, names in refused.items():
        answers |= dict.fromkeys(names.split(), Answer("it is off", why, OFF))
    return MappingProxyType({**answers, **only})
