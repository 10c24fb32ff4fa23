"""Rules about the options of optimizers, and about what a run with one of them may ask for."""

from collections.abc import Iterable, Iterator

from ..messages import flag, given
from ..optimizer_facts import FACTS, MOMENTS, OptimizerFacts, facts_of
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
    yield from _adam_variants(config) if facts.name == "adam" else ()
    yield from _muon_parts(config) if facts.name == "muon" else ()
    if config.optimizer.lamb_min_coeff > config.optimizer.lamb_max_coeff:
        yield "[lamb_min_coeff] is above [lamb_max_coeff]: no trust ratio is between them. Lower the minimum."


def _adam_variants(config: RunConfig) -> Iterator[str]:
    if config.optimizer.adam_amsgrad and not config.optimizer.adam_bias_correction:
        yield (
            "[adam_amsgrad] is torch's, which corrects its moments, but [adam_bias_correction]. Remove "
            "one of them."
        )


def _muon_parts(config: RunConfig) -> Iterator[str]:
    o = config.optimizer
    lion = ("optimizer.lion_beta1", "optimizer.lion_beta2")
    adam = [f"optimizer.{name}" for names in MOMENTS.values() for name in names]
    others = adam if o.muon_scalar_optimizer == "lion" else lion
    # Defaults of a JSON are no wish.
    wished = [
        path
        for path in others
        if path in config.sources and config.sources[path].kind != "deepspeed"
    ]
    yield from given(
        config,
        wished,
        "is not an option of [muon_scalar_optimizer], which updates what is not "
        "a matrix. Remove it.",
    )
    if o.muon_coefficient_type == "cubic5" and o.muon_num_ns_steps != 5:
        yield "[muon_coefficient_type] has coefficients of 5 iterations, but [muon_num_ns_steps]. Use 5."
    if o.muon_per_head and not o.muon_split_qkv:
        yield "[muon_per_head] divides what [muon_split_qkv] leaves in one. Remove one of them."
