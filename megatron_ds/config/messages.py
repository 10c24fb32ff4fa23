"""Problems that rules find, and parts of their messages: a value with its flag and source, alternatives."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from ..console import one_line
from ..errors import ConfigError
from ..mpu import grid
from .options.need import Need
from .options.option import Option
from .run import RunConfig, all_options

# Alternatives of a message; a longer list shows its first ones and the last.
MOST_SHOWN = 100
Rule = Callable[[RunConfig], Iterable[str]]


def problems_of(rules: Iterable[Rule], config: RunConfig) -> Iterator[str]:
    """Yield the problems that the rules find, or raise as a ConfigError, which ends the rule.

    In a problem, `[seed]` or `[train.seed]` stands for that option as the user wrote it (`written`).
    """
    paths = {}
    for path, option in all_options().items():
        paths[option.name] = path

    # Brackets around other words stay as they are.
    def named(match: re.Match) -> str:
        path = paths.get(match[1])
        return match[0] if path is None else written(config, path)

    for rule in rules:
        try:
            for problem in rule(config):
                yield re.sub(r"\[(?:\w+\.)?(\w+)\]", named, problem)
        except ConfigError as error:
            yield str(error)


def given(config: RunConfig, paths: Iterable[str], problem: str) -> Iterator[str]:
    """Yield `problem`, after its name and value, for each of these options that does not have its default."""
    for path in paths:
        if not config.is_default(path):
            yield f"[{path}] {problem}"


def flag(path: str) -> str:
    """Return the main flag of an option."""
    return all_options()[path].flag


def written(config: RunConfig, path: str) -> str:
    """Return an option and its value as the user wrote them, "--num-layers 3", with the source if that is a file."""
    option = all_options()[path]
    source = config.sources.get(path)
    value = config.get(path)

    # A value that is not from the command line is named by its main flag and its source.
    if source is None:
        return f"{_with_value(option, option.flag, value)} (default)"
    if source.kind != "flag":
        return f"{_with_value(option, option.flag, value)} ({source})"

    # A switch such as --fp16 or --swiglu names the value itself.
    if source.name not in (option.flag, *option.flags):
        return source.name
    # A flag such as --tiled-mlp may stand without its value.
    has_default_value = option.alone is not None and value == option.alone
    if has_default_value and option.kind is not bool:
        return source.name
    return _with_value(option, source.name, value)


def _with_value(option: Option, name: str, value: Any) -> str:
    """Return the words that give an option its value; a switch has a flag for each of its values."""
    if option.kind is bool:
        return option.flag if value else option.negative
    return f"{name} {value_text(value)}"


def value_text(value: Any) -> str:
    """Return a value as it is written after a flag."""
    if isinstance(value, tuple):
        return " ".join(map(value_text, value))
    if isinstance(value, bool):
        return str(value).lower()
    # A float shows as an integer where it is one, as long as its digits are exact.
    if isinstance(value, float):
        is_exact = abs(value) < 1e16
        if value.is_integer() and is_exact:
            return str(int(value))
    return one_line(str(value))


def either(values: Sequence[Any]) -> str:
    """Return `1, 2 or 4`; more than four consecutive numbers are `1 to 12`."""
    if len(values) > 4 and _are_consecutive(values):
        return f"{values[0]} to {values[-1]}"
    # A long list keeps its beginning and its last value.
    if len(values) > MOST_SHOWN:
        shown = values[:MOST_SHOWN]
        values = [*shown, "…", values[-1]]
    texts = list(map(str, values))
    if len(texts) < 2:
        return "".join(texts)
    last = texts.pop()
    first = ", ".join(texts)
    return f"{first} or {last}"


def all_of(texts: Sequence[str]) -> str:
    """Return `a, b and c`."""
    *first, last = texts
    return f"{', '.join(first)} and {last}" if first else last


def needed(wanted: Need) -> list[str]:
    """Return the flags, with their values, one of which an option needs: ["--zero-stage 2 or 3"]."""
    return [
        f"{flag(path)} {either(values)}" if values else flag(path)
        for path, values in wanted.choices
    ]


def _are_consecutive(values: Sequence[Any]) -> bool:
    """Return whether the values are integers, each one above the one before."""
    first = values[0]
    if not isinstance(first, int):
        return False
    end = first + len(values)
    row = range(first, end)
    # A range may be too long for a list.
    if isinstance(values, range):
        return values == row
    return list(values) == list(row)


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, in rising order."""
    return list(grid.divisors(number))


def neighbours(number: int, step: int) -> str:
    """Return the two multiples of `step` next to `number`: "8 or 12"."""
    below = number // step * step
    above = below + step
    if below == 0:
        return str(above)
    return either([below, above])
