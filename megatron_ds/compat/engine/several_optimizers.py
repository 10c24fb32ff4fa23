"""`SeveralOptimizers`: the inner optimizers of an engine whose JSON has more than one of them.

Patterns of names in the JSON divide the user's groups; a rule may give its parameters to another optimizer:

    "optimizer": {"type": "AdamW", "params": {…}, "param_groups": ["*.bias:lr_factor=2,decay=off"]}

With the type Muon each group becomes two: its matrices, with Muon's momentum and `muon_lr`, and the others,
with AdamW's numbers and `adam_lr`. Numbers that the group has itself are those of both.
`module_specs.has_matrix` decides which parameters of a module are matrices, as DeepSpeed does.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import nn

from ...config import OptimizerConfig
from ...config.optimizer_facts import FACTS, MATRIX, facts_of
from ...config.rules.group import GroupRule, group_rules, pattern_problems
from ...config.sources.reading import reject
from ...errors import ConfigError
from ...optim import OPTIMIZERS, ParamGroup, default_groups
from .json_settings import in_words_of_json
from .module_specs import has_matrix, named_parameters
from .optimizer import LR_FACTOR, Group, InnerOptimizers, registered_optimizer


class SeveralOptimizers:
    """`InnerOptimizers` that an engine uses as one.

    kind    the name in checkpoints
    groups  of all: torch's parameter groups of the engine
    """

    client: torch.optim.Optimizer | None = None

    def __init__(self, kind: str, inner: Sequence[InnerOptimizers]):
        self.kind = kind
        self._inner = inner
        self.groups = [group for one in inner for group in one.groups]

    def param_groups(self) -> tuple[ParamGroup, ...]:
        """Return the groups of `ZeroOptimizer`."""
        *others, last = self._inner
        has = lambda one, spec: spec.name in one.names
        return (
            *(ParamGroup(one.kind, partial(has, one), one) for one in others),
            *default_groups(last),
        )

    def forget(self) -> None:
        """Forget the inner optimizers that were made: others take their place."""
        for one in self._inner:
            one.forget()

    def refresh(self) -> None:
        """Copy the numbers of the user's groups to the inner ones."""
        for one in self._inner:
            one.refresh()


def json_optimizers(
    module: nn.Module, o: OptimizerConfig, groups: Sequence[Group]
) -> InnerOptimizers | SeveralOptimizers:
    """Return the JSON's optimizer. groups: "params", and the numbers that differ from the JSON's.

    Raises ConfigError for patterns of names that do not fit the module, and as `_muon`.
    """
    by_optimizer = _divided(module, o, groups, group_rules(o.param_groups))
    own = by_optimizer.pop(o.optimizer, [])
    others = [
        registered_optimizer(name, o, members) for name, members in by_optimizer.items()
    ]
    is_muon = FACTS[o.optimizer].depends == MATRIX
    of_type = (
        _muon(module, o, own)
        if is_muon
        else [registered_optimizer(o.optimizer, o, own)]
    )
    inner = [*others, *of_type]
    return inner[0] if len(inner) == 1 else SeveralOptimizers(o.optimizer, inner)


def _divided(
    module: nn.Module,
    o: OptimizerConfig,
    groups: Sequence[Group],
    rules: Sequence[GroupRule],
) -> dict[str, list[Group]]:
    """Name of an optimizer → its groups, those of each rule by themselves."""
    names = {p: name for name, p in named_parameters(module)}
    reject(_problems(rules, {names[p]: p for group in groups for p in group["params"]}))
    found: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        of_rules = defaultdict(list)
        for p in group["params"]:
            of_rules[
                next((rule for rule in rules if rule.matches(names[p])), GroupRule("*"))
            ].append(p)
        for rule, members in of_rules.items():
            facts = facts_of(rule.optimizer)
            name = facts.name if facts else rule.optimizer or o.optimizer
            found[name].append({**group, **_numbers(rule, o, group), "params": members})
    return found


def _numbers(rule: GroupRule, o: OptimizerConfig, group: Group) -> Group:
    """Return what the group of a rule has of its own."""
    numbers = {} if rule.lr_factor == 1.0 else {LR_FACTOR: rule.lr_factor}
    if rule.decay is not None:
        numbers["weight_decay"] = (
            (group.get("weight_decay") or o.weight_decay) if rule.decay else 0.0
        )
    return numbers


def _problems(
    rules: Sequence[GroupRule], named: Mapping[str, nn.Parameter]
) -> list[str]:
    problems = list(map(in_words_of_json, pattern_problems(rules, list(named))))
    for rule in rules:
        where = f'"optimizer.param_groups" {rule.pattern!r}'
        if rule.init_factor != 1.0:
            problems.append(
                f"{where} has init_factor, but an engine takes the weights of the module as they "
                "are. Remove it, and scale the weights in the module."
            )
        if rule.optimizer and OPTIMIZERS.declared(rule.optimizer).traits.needs_matrices:
            others = [
                name
                for name, p in named.items()
                if rule.matches(name) and not has_matrix(name, p)
            ]
            problems += [
                f"{where} gives {name} to {rule.optimizer}, which is for 2-D weights of hidden "
                "layers. Use a pattern of such weights."
                for name in others[:1]
            ]
    return problems


def _muon(
    module: nn.Module, o: OptimizerConfig, groups: Sequence[Group]
) -> list[InnerOptimizers]:
    """Return the JSON's Muon, and the optimizer of the rest. Raises ConfigError where no parameter is a matrix, and
    for options that need the heads of a layer."""
    if o.muon_per_head:
        raise ConfigError(
            '"per_head_muon" needs the heads of each attention layer, which a module does '
            "not state. Remove it; a training script takes --muon-per-head."
        )
    names = {p: name for name, p in named_parameters(module)}
    parameters = (p for group in groups for p in group["params"])
    in_matrices = {p for p in parameters if has_matrix(names[p], p)}
    if groups and not in_matrices:
        raise ConfigError(
            f"the optimizer Muon has no matrix to update: none of {len(names)} parameters "
            'is the 2-D weight of a hidden layer (names with "embed" or "lm_head" are none). '
            "Use AdamW."
        )
    # The numbers of both optimizers; rates of their own replace the common one.
    muon = {
        "lr": o.muon_lr or o.lr,
        "momentum": o.muon_momentum,
        "weight_decay": o.weight_decay,
    }
    facts = facts_of(o.muon_scalar_optimizer)
    assert facts is not None  # the option has no other choices
    scalar = facts.numbers(o) | {"lr": o.muon_scalar_lr or o.lr}
    return [
        registered_optimizer("muon", o, _only(groups, in_matrices, True), muon),
        registered_optimizer(
            o.muon_scalar_optimizer, o, _only(groups, in_matrices, False), scalar
        ),
    ]


def _only(
    groups: Sequence[Group], matrices: set[nn.Parameter], wanted: bool
) -> list[Group]:
    found = [
        {**group, "params": [p for p in group["params"] if (p in matrices) is wanted]}
        for group in groups
    ]
    return [group for group in found if group["params"]]
