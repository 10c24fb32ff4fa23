"""Problems that rules find, and parts of their messages: a value with its flag and source, alternatives."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from ..console import one_line
from ..errors import ConfigError
from ..mpu import grid
from .run import RunConfig, all_options

MOST_SHOWN = 100  # alternatives of a message
Rule = Callable[[RunConfig], Iterable[str]]


def problems_of(rules: Iterable[Rule], config: RunConfig) -> Iterator[str]:
    """The problems that the rules find, or raise as a ConfigError, which ends the rule.

    In a problem, `[seed]` or `[train.seed]` stands for that option as the user wrote it (`written`).
    """
    paths = {option.name: path for path, option in all_options().items()}

    def named(match: re.Match) -> str:
        return written(config, paths[match[1]]) if match[1] in paths else match[0]

    for rule in rules:
        try:
            for problem in rule(config):
                yield re.sub(r"\[(?:\w+\.)?(\w+)\]", named, problem)
        except ConfigError as error:
            yield str(error)


def given(config: RunConfig, paths: Iterable[str], problem: str) -> Iterator[str]:
    """`problem`, after its name and value, for each of these options that does not have its default."""
    return (f"[{path}] {problem}" for path in paths if not config.is_default(path))


def flag(path: str) -> str:
    """The main flag of an option."""
    return all_options()[path].flag


def written(config: RunConfig, path: str) -> str:
    """An option and its value as the user wrote them, "--num-layers 3", with the source if that is a file."""
    option = all_options()[path]
    source = config.sources.get(path)
    value = config.get(path)
    if (
        source is not None
        and source.kind == "flag"
        and source.name not in (option.flag, *option.flags)
    ):
        return source.name  # a switch: --fp16, --swiglu
    name = source.name if source is not None and source.kind == "flag" else option.flag
    if option.kind is bool:
        text = option.flag if value else option.negative
    elif (
        source is not None
        and source.kind == "flag"
        and option.alone is not None
        and value == option.alone
    ):
        text = name  # --tiled-mlp, without a number
    else:
        text = f"{name} {value_text(value)}"
    if source is None:
        return f"{text} (default)"
    return text if source.kind == "flag" else f"{text} ({source})"


def value_text(value: Any) -> str:
    """A value as it is written after a flag."""
    if isinstance(value, tuple):
        return " ".join(map(value_text, value))
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e16:
        return str(int(value))
    return str(value).lower() if isinstance(value, bool) else one_line(str(value))


def either(values: Sequence[Any]) -> str:
    """`1, 2 or 4`; more than four consecutive numbers are `1 to 12`."""
    if len(values) > 4 and isinstance(values[0], int):
        row = range(values[0], values[0] + len(values))
        if values == row if isinstance(values, range) else list(values) == list(row):
            return f"{values[0]} to {values[-1]}"
    if len(values) > MOST_SHOWN:
        values = [*values[:MOST_SHOWN], "…", values[-1]]
    texts = [str(value) for value in values]
    return " or ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)


def divisors(number: int) -> list[int]:
    """The divisors of a number, in rising order."""
    return list(grid.divisors(number))


def neighbours(number: int, step: int) -> str:
    """The two multiples of `step` next to `number`: "8 or 12"."""
    below = number // step * step
    return either([below, below + step] if below else [step])
