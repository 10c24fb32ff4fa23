"""What must hold between the values: all violations are reported at once, before anything is built.

A rule is a function from the config to the problems it finds. Each problem gives the numbers and their
sources, why it matters, and the valid alternatives. A rule returns nothing when a value that it needs is
missing; `missing` reports that.
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
    """Raises one ConfigError with all problems. `known`, `rules`: see `parse`.

    problems: those that reading found.  unread: paths of options whose value could not be read; a rule that
    names one of them judged its default, so its finding is left out.
    """
    rules_of_sections = (*LAYOUT_RULES, *TRAINING_RULES, *DATA_RULES, *DATA_EFFICIENCY_RULES)
    found = [problem for rule in rules_of_sections for problem in rule(config)]
    found += unknown_names(config, known or {})
    reject([*problems, *missing(config, unread), *(p for p in found if not _names_one_of(p, unread))])
    higher: list[str] = []
    for rule in rules:                       # they may build on all of the above
        higher += attempt(higher, lambda rule=rule: list(rule(config))) or []
    reject(higher)


def _names_one_of(problem: str, paths: Collection[str]) -> bool:
    flags = set(re.findall(r"--[a-zA-Z0-9_-]+", problem))
    return any(spelling.option.path in paths for flag, spelling in spellings().items() if flag in flags)


def missing(config: RunConfig, unread: Collection[str] = ()) -> Iterator[str]:
    names = [option.flag for path, option in all_options().items()
             if option.required and config.get(path) is None and path not in unread]
    if names:
        yield (f"missing: {', '.join(names)}. Give {'it' if len(names) == 1 else 'them'} as flags or in a "
               "--config file.")


def unknown_names(config: RunConfig, known: Mapping[str, Container[str]]) -> Iterator[str]:
    """Names of registry entries that do not exist; looked up here so that a typo is reported with all other
    problems.
    """
    for path, registry in known.items():
        name = config.get(path)
        if name is not None and name not in registry:
            try:
                registry[name]
            except ConfigError as error:
                yield f"{written(config, path)}: {error}"
            except (KeyError, TypeError):
                yield f"{written(config, path)} is unknown. {flag(path)} may be {either(list(registry))}."
