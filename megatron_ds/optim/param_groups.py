"""`ParamGroup`: which optimizer updates which parameters, at which learning rate and weight decay.

A run has a list of groups. A parameter belongs to the first group whose filter accepts its spec. Groups may
use different optimizers: matrices an orthogonalising one and the rest AdamW, for example. Without other
instructions there are two groups of one optimizer, with and without weight decay.

An entry of the registry chooses its own groups by an attribute `param_groups`, a function from the
optimizer's section of the configuration to groups. A new optimizer with groups is therefore one file.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..config import OptimizerConfig
from ..errors import ConfigError
from ..mpu.param_spec import ParamSpec
from .optimizers import OPTIMIZERS


class MakeOptimizer(Protocol):
    """From torch parameter groups {"params": [...], "decay": bool, "lr_factor": float} to a torch optimizer.

    Attributes state what it needs; all are False where absent:

    needs_whole_tensors  each tensor of a group is a whole parameter of its own shape, not a flat part of one
    needs_norms          it is called with the keyword `reduce_norms` (zero/norm.py `ParameterNorms`)
    """

    def __call__(self, groups: list[dict[str, Any]], /, **options: Any) -> torch.optim.Optimizer: ...


@dataclass(frozen=True)
class ParamGroup:
    """The parameters that `filter` accepts, updated by `optimizer`.

    name       in messages
    lr_factor  the learning rate of the group is that of the schedule multiplied by this
    decay      weight decay applies
    """

    name: str
    filter: Callable[[ParamSpec], bool]
    optimizer: MakeOptimizer
    lr_factor: float = 1.0
    decay: bool = True

    @property
    def needs_whole_tensors(self) -> bool:
        """Whether one rank must hold a whole parameter to update it."""
        return getattr(self.optimizer, "needs_whole_tensors", False)

    @property
    def needs_norms(self) -> bool:
        """Whether the optimizer uses norms of whole parameters."""
        return getattr(self.optimizer, "needs_norms", False)


@dataclass(frozen=True)
class RegisteredOptimizer:
    """A `MakeOptimizer`: an entry of the registry with the numbers of the configuration."""

    name: str
    settings: OptimizerConfig

    def __call__(self, groups: list[dict[str, Any]], /, **options: Any) -> torch.optim.Optimizer:
        return OPTIMIZERS[self.name](groups, settings=self.settings, **options)

    @property
    def needs_whole_tensors(self) -> bool:
        """As the entry declares."""
        return getattr(OPTIMIZERS[self.name], "needs_whole_tensors", False)

    @property
    def needs_norms(self) -> bool:
        """As the entry declares."""
        return getattr(OPTIMIZERS[self.name], "needs_norms", False)


def default_groups(optimizer: MakeOptimizer) -> tuple[ParamGroup, ...]:
    """Parameters with weight decay, then those without."""
    return (ParamGroup("decay", lambda spec: spec.decay, optimizer),
            ParamGroup("no decay", lambda spec: not spec.decay, optimizer, decay=False))


def param_groups_of(settings: OptimizerConfig) -> tuple[ParamGroup, ...]:
    """The groups of `--optimizer`: those that its entry chooses, else the default ones."""
    entry = OPTIMIZERS[settings.optimizer]
    choose = getattr(entry, "param_groups", None)
    return choose(settings) if choose else default_groups(RegisteredOptimizer(settings.optimizer, settings))


def group_of(spec: ParamSpec, groups: Sequence[ParamGroup]) -> ParamGroup:
    """The first group that accepts the parameter. Raises ConfigError if none does."""
    for group in groups:
        if group.filter(spec):
            return group
    names = ", ".join(group.name for group in groups)
    raise ConfigError(f"{spec.name} belongs to none of the parameter groups {names}, so no optimizer "
                      "would update it. Add a group whose filter accepts it.")
