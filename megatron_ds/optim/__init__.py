"""Optimizers by name, and the groups of parameters that they update."""

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

OPTIMIZERS.declare(f"{__name__}.adam_choice", "adam", aliases={"adamw": "adam"})
OPTIMIZERS.declare(f"{__name__}.momentum_sgd", "sgd")

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
