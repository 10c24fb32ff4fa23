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
OPTIMIZERS.declare(f"{__name__}.muon", "muon", aliases={"dist_muon": "muon"})
for _name, _module in {
    "lamb": "lamb",
    "lion": "lion",
    "adagrad": "adagrad",
    "sgd": "momentum_sgd",
}.items():
    OPTIMIZERS.declare(f"{__name__}.{_module}", _name)

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
