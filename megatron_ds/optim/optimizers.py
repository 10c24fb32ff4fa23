"""The registry of optimizers: functions from parameter groups and `OptimizerConfig` to a torch optimizer.
With the groups of parameters.

An entry receives groups {"params": [fp32 tensors], "decay": bool, "lr_factor": float, "rate": str}; "lr" and
"weight_decay" of each group are set before every step. Its state tensors have as many elements as the
parameter, apart from a count named "step".

By default an entry must treat elements one by one: its tensors are flat and may be parts of parameters. An
entry with other needs, or one that chooses its parameter groups, is registered with a `Declared`. A new
optimizer with groups is therefore one file.
Those of this package have a file each, and a row of `config/optimizer_facts.py` with their options, names and
state.

A run has a list of `ParamGroup`s. A parameter belongs to the first group whose filter accepts its spec.
Groups may use different optimizers: matrices Muon and the rest AdamW, for example. Without other instructions
there are two groups of one optimizer, with and without weight decay. Each --param-group divides them: the
parameters that its pattern matches have other numbers, or another optimizer. With --decoupled-lr each group
is divided once more: word embeddings and output layers have another learning rate.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Protocol

import torch

from ..config import OptimizerConfig
from ..config.options.training import DECOUPLED_RATE, MAIN_RATE
from ..config.rules.group import GroupRule, group_rules
from ..errors import ConfigError
from ..mpu.param_spec import ParamSpec
from ..registry import Registry

logger = logging.getLogger(__name__)
Make = Callable[..., torch.optim.Optimizer]


def fused(kind: type, groups: list[dict], **options: Any) -> torch.optim.Optimizer:
    """Return an optimizer of torch with one kernel over all tensors; its multi-tensor implementation, with a line in
    the log, if the device has no fused one."""
    try:
        return kind(groups, fused=True, **options)
    except RuntimeError as reason:
        logger.warning("%s runs unfused: %s", kind.__name__, reason)
        return kind(groups, foreach=True, **options)


class MakeOptimizer(Protocol):
    """Makes a torch optimizer from parameter groups. `traits_of` returns what the optimizer needs."""

    def __call__(
        self, groups: list[dict[str, Any]], /, **options: Any
    ) -> torch.optim.Optimizer: ...

    # Groups of one optimizer are found by it.
    def __hash__(self) -> int: ...


@dataclass(frozen=True)
class OptimizerTraits:
    """What an optimizer needs of the ranks that hold parts of its parameters. The default is nothing.

    needs_whole_tensors  each tensor of a group is a whole parameter of its own shape, not a flat part of one
    needs_norms          it is made with the keyword `reduce_norms` (zero/norm.py `ParameterNorms`)
    needs_matrices       it is made with the keyword `for_each` (zero/whole_matrices.py `WholeMatrices`)
    steps_in_halves      with needs_norms: it is a `HalvedOptimizer`, which can update offloaded state, of which
                         only a part is in memory at a time
    update_rule          `UpdateRule` (zero/update_rule.py): what its ranks exchange, and keep for it; None:
                         the sum of gradients
    """

    needs_whole_tensors: bool = False
    needs_norms: bool = False
    needs_matrices: bool = False
    steps_in_halves: bool = False
    update_rule: Any | None = None

    @property
    def is_collective(self) -> bool:
        """Whether ranks communicate in a step of the optimizer."""
        return self.needs_norms or self.needs_matrices or self.update_rule is not None


NO_NEEDS = OptimizerTraits()


def traits_of(make: MakeOptimizer) -> OptimizerTraits:
    """Return what an optimizer needs: the attribute `traits` of what makes it, or nothing."""
    return getattr(make, "traits", NO_NEEDS)


@dataclass(frozen=True)
class ParamGroup:
    """The parameters that `filter` accepts, updated by `optimizer`, with or without weight decay.

    rate       the name of its learning rate: MAIN_RATE, or another one of the run
    lr_factor  that learning rate is multiplied by it
    """

    name: str
    filter: Callable[[ParamSpec], bool]
    optimizer: MakeOptimizer
    lr_factor: float = 1.0
    decay: bool = True
    rate: str = MAIN_RATE

    @property
    def traits(self) -> OptimizerTraits:
        """What the optimizer needs."""
        return traits_of(self.optimizer)


@dataclass(frozen=True)
class Declared:
    """What an entry of the registry declares.

    rule_of    from the settings to the update rule among the traits; None: the sum of gradients
    groups_of  from the settings to the groups that the optimizer chooses; None: the default ones
    """

    traits: OptimizerTraits = NO_NEEDS
    rule_of: Callable[[OptimizerConfig], Any] | None = None
    groups_of: Callable[[OptimizerConfig], tuple[ParamGroup, ...]] | None = None

    def traits_for(self, settings: OptimizerConfig) -> OptimizerTraits:
        """Return the traits in a configuration."""
        if self.rule_of is None:
            return self.traits
        return replace(self.traits, update_rule=self.rule_of(settings))


NOTHING = Declared()


class OptimizerRegistry(Registry[Callable[..., torch.optim.Optimizer]]):
    """A `Registry` of functions, with what each declares."""

    def __init__(self) -> None:
        super().__init__("optimizer")
        self._declared: dict[str, Declared] = {}

    def register(
        self, name: str, *aliases: str, declares: Declared = NOTHING
    ) -> Callable[[Make], Make]:
        """Return a decorator that adds an entry under `name`. Aliases find it, too, but are not listed."""
        accept: Callable[[Make], Make] = super().register(name, *aliases)

        def add(make: Make) -> Make:
            accepted = accept(make)
            self._declared[name] = declares
            return accepted

        return add

    def declared(self, name: str) -> Declared:
        """Return what an entry declares. Raises ConfigError for an unknown name."""
        _refuse_attributes(name, self[name])
        return self._declared.get(self.name_of(name), NOTHING)


def _refuse_attributes(name: str, make: Callable) -> None:
    """Raise ConfigError for a function whose needs are attributes, which nothing reads."""
    names = [*(needs.name for needs in fields(OptimizerTraits)), "param_groups"]
    unread = [name for name in names if hasattr(make, name)]
    if unread:
        raise ConfigError(
            f"optimizer {name}: its function has the attribute {unread[0]}, which is not read, so that it would get "
            "parts of tensors as if it needed nothing. Register it with declares=Declared(…) of megatron_ds.optim, "
            "whose OptimizerTraits have what it needs."
        )


OPTIMIZERS = OptimizerRegistry()


@dataclass(frozen=True)
class RegisteredOptimizer:
    """A `MakeOptimizer`: an entry of the registry with the numbers of the configuration."""

    name: str
    settings: OptimizerConfig

    def __call__(
        self, groups: list[dict[str, Any]], /, **options: Any
    ) -> torch.optim.Optimizer:
        return OPTIMIZERS[self.name](groups, settings=self.settings, **options)

    @property
    def traits(self) -> OptimizerTraits:
        """What the entry declares for this configuration."""
        return OPTIMIZERS.declared(self.name).traits_for(self.settings)


def default_groups(optimizer: MakeOptimizer) -> tuple[ParamGroup, ...]:
    """Parameters with weight decay, then those without."""
    return (
        ParamGroup("decay", lambda spec: spec.decay, optimizer),
        ParamGroup("no decay", lambda spec: not spec.decay, optimizer, decay=False),
    )


def param_groups_of(settings: OptimizerConfig) -> tuple[ParamGroup, ...]:
    """Return the groups of `--optimizer`: those that its entry chooses, else the default ones; divided by
    --param-group and --decoupled-lr. Raises ConfigError for a --param-group that cannot be read."""
    choose = OPTIMIZERS.declared(settings.optimizer).groups_of
    groups = (
        choose(settings)
        if choose
        else default_groups(RegisteredOptimizer(settings.optimizer, settings))
    )
    divided = []
    for rule in group_rules(settings.param_groups):
        divided += [_of_rule(rule, group, groups, settings) for group in groups]
    groups = (*divided, *groups)
    if settings.decoupled_lr is None:
        return groups
    return (
        *(
            replace(
                group,
                name=f"{group.name}, decoupled",
                filter=partial(_is_decoupled, group),
                rate=DECOUPLED_RATE,
            )
            for group in groups
        ),
        *groups,
    )


def _of_rule(
    rule: GroupRule,
    group: ParamGroup,
    groups: Sequence[ParamGroup],
    settings: OptimizerConfig,
) -> ParamGroup:
    """Return the parameters of `group` that match the rule."""
    optimizer = group.optimizer
    factor = group.lr_factor
    if rule.optimizer is not None:
        optimizer = RegisteredOptimizer(OPTIMIZERS.name_of(rule.optimizer), settings)
        factor = next(
            (other.lr_factor for other in groups if other.optimizer == optimizer), 1.0
        )
    return replace(
        group,
        name=f"{rule.pattern}, {group.name}",
        filter=partial(_follows, rule, group),
        optimizer=optimizer,
        lr_factor=factor * rule.lr_factor,
        decay=group.decay if rule.decay is None else rule.decay,
    )


def _follows(rule: GroupRule, group: ParamGroup, spec: ParamSpec) -> bool:
    return rule.matches(spec.name) and group.filter(spec)


def _is_decoupled(group: ParamGroup, spec: ParamSpec) -> bool:
    return spec.is_vocabulary and group.filter(spec)


def group_of(spec: ParamSpec, groups: Sequence[ParamGroup]) -> ParamGroup:
    """Return the first group that accepts the parameter. Raises ConfigError if none does."""
    for group in groups:
        if group.filter(spec):
            return group
    names = ", ".join(group.name for group in groups)
    raise ConfigError(
        f"{spec.name} belongs to none of the parameter groups {names}, so no optimizer "
        "would update it. Add a group whose filter accepts it."
    )
