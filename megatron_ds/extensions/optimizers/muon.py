"""The optimizer "muon": a momentum whose matrices are made orthogonal (Jordan et al. 2024, "Muon: an
optimizer for hidden layers in neural networks").

    m ← μ m + (1 - μ) g
    u = m, with Nesterov's momentum (1 - μ) g + μ m
    p ← p (1 - lr wd) - lr · factor · scale · orthogonal(u)              extensions/optimizers/newton_schulz.py

for each matrix, of o rows and i columns, of which a parameter consists (`ParamSpec.matrices`):

    scale            factor of a matrix       of an update with o = 4 i
    spectral         √max(o, i)               Megatron's; with the factor 0.2 that of match_rms_adamw
    unit_rms_norm    √(o / i)                 2: rows that are as large as those of the input
    shape_scaling    √max(1, o / i)           2: DeepSpeed's and Jordan's, 1 where i is larger
    match_rms_adamw  0.2 √max(o, i)           elements as large as AdamW's (Liu et al. 2025, arXiv:2502.16982)

A learning rate of one scale does not suit another one. Only weights of hidden linear layers have matrices.
All other parameters are updated by `muon_scalar_optimizer`, in parameter groups of their own.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...config import OptimizerConfig
from ...mpu.param_spec import Matrices, ParamSpec
from ...optim.matrix_batches import HEADS, PARTS, WHOLE, change_matrices
from ...optim.optimizers import (
    OPTIMIZERS,
    Declared,
    OptimizerTraits,
    ParamGroup,
    RegisteredOptimizer,
    default_groups,
)
from ...optim.part_optimizer import PartOptimizer, gradients_of
from .newton_schulz import SETS, newton_schulz

# for_each(change, unit, parts of updates, parameters) → the parts after `change` of the matrices.
ForEachMatrix = Callable[
    [
        Callable[[torch.Tensor], torch.Tensor],
        str,
        Sequence[torch.Tensor],
        Sequence[torch.Tensor],
    ],
    Sequence[torch.Tensor],
]
SCALES: Mapping[str, Callable[[int, int], float]] = {
    "spectral": lambda o, i: max(o, i) ** 0.5,
    "unit_rms_norm": lambda o, i: (o / i) ** 0.5,
    "shape_scaling": lambda o, i: max(1.0, o / i) ** 0.5,
    "match_rms_adamw": lambda o, i: 0.2 * max(o, i) ** 0.5,
}
NUMBERS = dict(lr=1e-3, momentum=0.95, weight_decay=0.0)


@dataclass(frozen=True)
class MuonRule:
    """What all groups have in common.

    unit   the matrices of packed parameters: PARTS, HEADS or WHOLE (optim/matrix_batches.py)
    dtype  of the products: "fp32", "bf16", or "auto", which is bf16 on GPUs (in plans the meta device)
    """

    nesterov: bool = False
    coefficients: str = "quintic"
    steps: int = 5
    scale: str = "spectral"
    factor: float = 1.0
    unit: str = PARTS
    dtype: str = "auto"

    def orthogonal(self, batch: torch.Tensor) -> torch.Tensor:
        """[n, o, i] → scaled updates of these matrices."""
        low = (
            self.dtype == "bf16" or self.dtype == "auto" and batch.device.type != "cpu"
        )
        scale = self.factor * SCALES[self.scale](*batch.shape[1:])
        coefficients = SETS[self.coefficients].first(self.steps)
        return newton_schulz(batch, coefficients, torch.bfloat16 if low else None).mul_(
            scale
        )


class Muon(PartOptimizer):
    """Muon on fp32 parts of parameters; a step has one collective call of `for_each`.

    for_each: changes all matrices of parameters of which this rank has parts (zero/whole_matrices.py); None:
    each parameter is whole, in its own shape
    numbers: of all groups that have no others; the defaults are NUMBERS
    """

    STATE = ("momentum_buffer",)

    def __init__(
        self,
        params: Iterable,
        rule: MuonRule = MuonRule(),
        for_each: ForEachMatrix | None = None,
        **numbers: Any,
    ):
        super().__init__(params, NUMBERS | numbers)
        self.rule = rule
        self._for_each = for_each or _of_whole

    def make_step(self) -> None:
        """Update the parameters with their gradients. Collective if `for_each` is.

        With learning rates of 0 only the momentum changes, and nothing is communicated.
        """
        groups = [
            (group, [p for p in group["params"] if p.grad is not None])
            for group in self.param_groups
        ]
        inputs = [u for group, members in groups for u in self._inputs(group, members)]
        if not any(group["lr"] for group in self.param_groups):
            return
        parameters = [p for _, members in groups for p in members]
        updates = iter(
            self._for_each(self.rule.orthogonal, self.rule.unit, inputs, parameters)
        )
        for group, members in groups:
            if members:
                torch._foreach_mul_(members, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(
                    members, [next(updates) for _ in members], alpha=-group["lr"]
                )

    def _inputs(
        self, group: dict[str, Any], members: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        """New tensors, u of each parameter of a group, after its momentum is updated."""
        if not members:
            return ()
        grads = gradients_of(members)
        momentum = group["momentum"]
        moments = [self.state_of(p)["momentum_buffer"] for p in members]
        torch._foreach_lerp_(moments, grads, 1 - momentum)
        return torch._foreach_lerp(
            grads, moments, momentum if self.rule.nesterov else 1.0
        )


def _of_whole(
    change: Callable[[torch.Tensor], torch.Tensor],
    unit: str,
    inputs: Sequence[torch.Tensor],
    parameters: Sequence[torch.Tensor],
) -> Sequence[torch.Tensor]:
    """`ForEachMatrix` of parameters of which each is whole."""
    of = [
        getattr(getattr(p, "spec", None), "matrices", None) or Matrices()
        for p in parameters
    ]
    change_matrices(change, unit, list(zip(inputs, of)))
    return inputs


def rule_of(settings: OptimizerConfig) -> MuonRule:
    """Return the rule of a configuration."""
    if settings.muon_per_head:
        unit = HEADS
    elif settings.muon_split_qkv:
        unit = PARTS
    else:
        unit = WHOLE
    return MuonRule(
        settings.muon_use_nesterov,
        settings.muon_coefficient_type,
        settings.muon_num_ns_steps,
        settings.muon_scale_mode,
        settings.muon_extra_scale_factor,
        unit,
        settings.muon_ns_dtype,
    )


def muon_groups(settings: OptimizerConfig) -> tuple[ParamGroup, ...]:
    """Weights of hidden layers; then what is left, with and without weight decay, for the other optimizer."""
    muon, scalar = (
        RegisteredOptimizer(name, settings)
        for name in ("muon", settings.muon_scalar_optimizer)
    )
    factor = lambda rate: 1.0 if rate is None else rate / settings.lr
    of_rest = [
        replace(group, lr_factor=factor(settings.muon_scalar_lr))
        for group in default_groups(scalar)
    ]
    return (
        ParamGroup("matrices", has_matrices, muon, lr_factor=factor(settings.muon_lr)),
        *of_rest,
    )


def has_matrices(spec: ParamSpec) -> bool:
    """Return whether the parameter is the weight of a hidden linear layer."""
    return spec.matrices is not None and spec.decay


@OPTIMIZERS.register(
    "muon",
    "dist_muon",
    declares=Declared(OptimizerTraits(needs_matrices=True), groups_of=muon_groups),
)
def make_muon(
    groups: list[dict],
    settings: OptimizerConfig,
    *,
    for_each: ForEachMatrix | None = None,
) -> torch.optim.Optimizer:
    """Megatron's "muon", or DeepSpeed's "Muon" with its options."""
    return Muon(
        groups, rule_of(settings), for_each, lr=0.0, momentum=settings.muon_momentum
    )
