"""`MuonOptimizers`: the inner optimizers of an engine whose JSON has the type Muon, one for matrices, one for
the rest.

Each of the user's groups becomes two: its matrices, with Muon's momentum and `muon_lr`, and the others, with
AdamW's numbers and `adam_lr`. Numbers that the group has itself are those of both. `module_specs.has_matrix`
decides which parameters of a module are matrices, as DeepSpeed does.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn

from ..config import OptimizerConfig
from ..config.optimizer_facts import FACTS
from ..errors import ConfigError
from ..optim import OPTIMIZERS, ParamGroup, default_groups
from .engine_optimizer import Group, InnerOptimizers
from .module_specs import has_matrix


class MuonOptimizers:
    """Two `InnerOptimizers` that an engine uses as one.

    groups  of both: torch's parameter groups of the engine
    """

    kind, client = "muon", None

    def __init__(self, matrices: InnerOptimizers, rest: InnerOptimizers):
        self._both = matrices, rest
        self.groups = [*matrices.groups, *rest.groups]

    def param_groups(self) -> tuple[ParamGroup, ...]:
        """The groups of `ZeroOptimizer`."""
        matrices, rest = self._both
        of_matrices = ParamGroup("matrices", lambda spec: spec.matrices is not None, matrices)
        return (of_matrices, *default_groups(rest))

    def refresh(self) -> None:
        """Copy the numbers of the user's groups to the inner ones."""
        for inner in self._both:
            inner.refresh()


def muon_optimizers(module: nn.Module, o: OptimizerConfig, groups: Sequence[Group]) -> MuonOptimizers:
    """The JSON's Muon. groups: "params", and the numbers that differ from the JSON's.

    Raises ConfigError where no parameter is a matrix, and for options that need the heads of a layer.
    """
    if o.muon_per_head:
        raise ConfigError('"per_head_muon" needs the heads of each attention layer, which a module does '
                          "not state. Remove it; a training script takes --muon-per-head.")
    names = {p: name for name, p in module.named_parameters()}
    in_matrices = {p for group in groups for p in group["params"] if has_matrix(names[p], p)}
    if groups and not in_matrices:
        raise ConfigError(f"the optimizer Muon has no matrix to update: none of {len(names)} parameters "
                          'is the 2-D weight of a hidden layer (names with "embed" or "lm_head" are none). '
                          "Use AdamW.")
    muon = {"lr": o.muon_lr or o.lr, "momentum": o.muon_momentum, "weight_decay": o.weight_decay}
    scalar = FACTS[o.muon_scalar_optimizer].numbers(o) | {"lr": o.muon_scalar_lr or o.lr}
    return MuonOptimizers(_of(o, "muon", muon, _only(groups, in_matrices, True)),
                          _of(o, o.muon_scalar_optimizer, scalar, _only(groups, in_matrices, False)))


def _of(o: OptimizerConfig, name: str, numbers: Mapping[str, Any],
        groups: Sequence[Group]) -> InnerOptimizers:
    return InnerOptimizers(name, [{**numbers, **group} for group in groups],
                           partial(OPTIMIZERS[name], settings=o), needs_matrices=name == "muon")


def _only(groups: Sequence[Group], matrices: set[nn.Parameter], wanted: bool) -> list[Group]:
    found = [{**group, "params": [p for p in group["params"] if (p in matrices) is wanted]}
             for group in groups]
    return [group for group in found if group["params"]]
