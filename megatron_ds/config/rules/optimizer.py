"""Rules about the options of optimizers, and about what a run with one of them may ask for."""

from collections.abc import Iterable, Iterator

from ..messages import flag, given
from ..optimizer_facts import FACTS, OptimizerFacts, facts_of
from ..run import RunConfig
from .group import group_rules


def _own_paths(optimizers: Iterable[OptimizerFacts]) -> dict[str, None]:
    """Paths of the options that only these optimizers have, in the order of the optimizers."""
    paths: dict[str, None] = {}
    for facts in optimizers:
        paths |= dict.fromkeys(f"optimizer.{name}" for name in facts.own_fields)
    return paths


def optimizer_options(config: RunConfig) -> Iterator[str]:
    """Options of one optimizer have no effect on another one."""
    facts = facts_of(config.optimizer.optimizer)
    rules = group_rules(config.optimizer.param_groups)
    if facts is None:
        return
    # Options of the optimizers in use, and those that only other optimizers have.
    used = (facts, *(facts_of(rule.optimizer) for rule in rules))
    own = _own_paths(one for one in used if one is not None)
    others = [path for path in _own_paths(FACTS.values()) if path not in own]
    yield from given(
        config,
        others,
        "is not an option of [optimizer], which has "
        f"{', '.join(map(flag, own))}. Remove it.",
    )
    # Rules of single optimizers.
    for rule in facts.rules:
        yield from rule(config)
