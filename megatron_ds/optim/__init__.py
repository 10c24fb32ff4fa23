"""Optimizers by name, and the groups of parameters that they update."""

from . import (  # noqa: F401      each registers its optimizer
    adagrad,
    adam_choice,
    lamb,
    lion,
    momentum_sgd,
    muon,
)
from .optimizers import (
    OPTIMIZERS,
    Declared,
    MakeOptimizer,
    OptimizerTraits,
    ParamGroup,
    RegisteredOptimizer,
    default_groups,
    group_of,
    param_groups_of,
)

__all__ = [
    "OPTIMIZERS",
    "Declared",
    "MakeOptimizer",
    "OptimizerTraits",
    "ParamGroup",
    "RegisteredOptimizer",
    "default_groups",
    "group_of",
    "param_groups_of",
]
