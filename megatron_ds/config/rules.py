"""Constraints between options. All violations are reported at once, before anything is built.

A rule is a function from the config to the problems that it finds. Each problem states the numbers and their
sources, why they are wrong, and the valid alternatives. A rule yields nothing if a value that it needs is
missing, because `missing` reports that.
"""

import re
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence

from ..errors import ConfigError
from .data_efficiency_rules import DATA_EFFICIENCY_RULES
from .data_rules import DATA_RULES
from .flags import spellings
from .layout_rules import LAYOUT_RULES
from .messages import either, flag, written
from .reading import attempt, reject
from .run import RunConfig, all_options
from .training_rules import TRAINING_RULES

Rule = Callable[[RunConfig], Iterable[str]]


def check(config: RunConfig, known: Mapping[str, Container[str]] | None = None, rules: Sequence[Rule] = (),
          problems: Sequence[str] = (), unread: Collection[str] = ()) -> None:
    """Raise one ConfigError with all problems, if there are any.

    known, rules  see `parse`
    problems      found while the sources were read
    unread        paths of options whose value could not be read. They have their defaults here, so problems
                  that mention one of them are left out
    """
    rules_of_sections = (*LAYOUT_RULES, *TRAINING_RULES, *DATA_RULES, *DATA_EFFICIENCY_RULES)
    found = [problem for rule in rules_of_sections for problem in rule(config)]
    found += unknown_names(config, known or {})
    reject([*problems, *missing(config, unread), *(p for p in found if not _names_one_of(p, unread))])
    higher: list[str] = []
    for rule in rules:                       # they rely on the rules above
        higher += attempt(higher, lambda rule=rule: list(rule(config))) or []
    reject(higher)


def _names_one_of(problem: str, paths: Collection[str]) -> bool:
    flags = set(re.findall(r"--[a-zA-Z0-9_-]+", problem))
    return any(spelling.option.path in paths for flag, spelling in spellings().items() if flag in flags)


def missing(config: RunConfig, unread: Collection[str] = ()) -> Iterator[str]:
    """One problem with all required options that have no value."""
    names = [option.flag for path, option in all_options().items()
             if option.required and config.get(path) is None and path not in unread]
    if names:
        yield (f"missing: {', '.join(names)}. Give {'it' if len(names) == 1 else 'them'} as flags or in a "
               "--config file.")


def unknown_names(config: RunConfig, known: Mapping[str, Container[str]]) -> Iterator[str]:
    """Names that are not in their registry. known: path of the option → the registry."""
    for path, registry in known.items():
        name = config.get(path)
        if name is not None and name not in registry:
            try:
                registry[name]
            except ConfigError as error:
                yield f"{written(config, path)}: {error}"
            except (KeyError, TypeError):
                yield f"{written(config, path)} is unknown. {flag(path)} may be {either(list(registry))}."
