"""What must hold between the values: every broken rule is reported at once, before anything is built.

A rule is a function from the config to the problems it sees. Each problem says the numbers and where they came from, why it
matters, and the legal alternatives. A rule keeps quiet when a value that it needs is missing; `missing` speaks of that.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence

from ..errors import ConfigError
from .problems import attempt, reject
from .rules_curriculum import CURRICULUM_RULES
from .rules_layout import LAYOUT_RULES
from .rules_routing import ROUTING_RULES
from .rules_run import RUN_RULES
from .rules_samples import SAMPLE_RULES
from .run import RunConfig, all_options
from .say import either, flag, say

Rule = Callable[[RunConfig], Iterable[str]]


def check(config: RunConfig, known: Mapping[str, Container[str]] | None = None, rules: Sequence[Rule] = ()) -> None:
    """Raises one ConfigError with all problems. `known`, `rules`: see `parse`."""
    rules_of_sections = (*LAYOUT_RULES, *RUN_RULES, *SAMPLE_RULES, *CURRICULUM_RULES, *ROUTING_RULES)
    problems = [problem for rule in (missing, *rules_of_sections) for problem in rule(config)]
    reject([*problems, *unknown_names(config, known or {})])
    for rule in rules:                       # they may build on all of the above
        problems += attempt(problems, lambda rule=rule: list(rule(config))) or []
    reject(problems)


def missing(config: RunConfig) -> Iterator[str]:
    names = [option.flag for path, option in all_options().items() if option.required and config.get(path) is None]
    if names:
        yield f"missing: {', '.join(names)}. Give {'it' if len(names) == 1 else 'them'} as flags or in a --config file."


def unknown_names(config: RunConfig, known: Mapping[str, Container[str]]) -> Iterator[str]:
    """Names of registered things, looked up early so that a typo is reported with everything else."""
    for path, registry in known.items():
        name = config.get(path)
        if name is not None and name not in registry:
            try:
                registry[name]
            except ConfigError as error:
                yield f"{say(config, path)}: {error}"
            except (KeyError, TypeError):
                yield f"{say(config, path)} is unknown. {flag(path)} may be {either(list(registry))}."
