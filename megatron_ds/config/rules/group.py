"""`GroupRule`: one --param-group, by which the parameters of a pattern of names have their own numbers. Pure.

    "*.linear_fc?.weight:lr_factor=0.25,init_factor=0.5"        pattern, then what differs from the other ones

A pattern is one of file names: * is any text, ? any character, [ab] one of two.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from ...errors import ConfigError
from ...registry import did_you_mean
from ..options.option import Option, coerce

# Key → its values, as options have them.
KEYS: Mapping[str, Option] = {
    "optimizer": Option(None, "Name of a registered optimizer."),
    "lr_factor": Option(
        1.0, "The learning rate is multiplied by it.", kind=float, above=0
    ),
    "decay": Option(None, "Whether weight decay applies.", kind=bool),
    "init_factor": Option(
        1.0,
        "The standard deviation of initial weights is multiplied by it.",
        kind=float,
        at_least=0,
    ),
}
MOST_NAMES = 30  # in a message


@dataclass(frozen=True)
class GroupRule:
    """What is different for parameters whose names match `pattern`; None: nothing.

    decay: whether weight decay applies. init_factor: of the standard deviation of initial weights
    """

    pattern: str
    optimizer: str | None = None
    lr_factor: float = 1.0
    decay: bool | None = None
    init_factor: float = 1.0

    def matches(self, name: str) -> bool:
        """Whether a parameter of this name is in the group."""
        return fnmatchcase(name, self.pattern)


def group_rule(text: str) -> GroupRule:
    """The rule of a text. Raises ConfigError."""
    where = f"--param-group {text!r}"
    pattern, colon, rest = text.rpartition(":")
    words = [word.partition("=") for word in rest.split(",")]
    if not pattern or not all(equals and value for _, equals, value in words):
        raise ConfigError(
            f"{where} is not PATTERN:KEY=VALUE,KEY=VALUE, such as '*.bias:lr_factor=2'. Keys: "
            f"{', '.join(KEYS)}."
        )
    values = {}
    for key, _, value in words:
        if key not in KEYS or key in values:
            near = "" if key in values else did_you_mean(key, list(KEYS))
            what = f"{key} twice" if key in values else f"the key {key!r}"
            raise ConfigError(
                f"{where} has {what}{near or '.'} Keys: {', '.join(KEYS)}, each once."
            )
        values[key] = coerce(KEYS[key], value, f"{where}: {key}")
    return GroupRule(pattern, **values)


def group_rules(texts: Sequence[str]) -> tuple[GroupRule, ...]:
    """The rules of all --param-group. Raises ConfigError."""
    return tuple(map(group_rule, texts))


def pattern_problems(rules: Sequence[GroupRule], names: Sequence[str]) -> Iterator[str]:
    """Patterns that match none of the parameters, and parameters that two patterns match."""
    for rule in rules:
        if not any(map(rule.matches, names)):
            known = list(
                dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in names)
            )
            more = (
                f" and {len(known) - MOST_NAMES} more"
                if len(known) > MOST_NAMES
                else ""
            )
            yield (
                f"--param-group {rule.pattern!r} matches none of the {len(names)} parameters, so it would "
                f"have no effect. Parameters: {', '.join(known[:MOST_NAMES])}{more}."
            )
    for name in names:
        both = [rule.pattern for rule in rules if rule.matches(name)]
        if len(both) > 1:
            yield (
                f"{name} matches --param-group {both[0]!r} and {both[1]!r}, and a parameter is in one "
                "group. Use patterns of which one matches it."
            )
            return
