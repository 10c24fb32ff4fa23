"""The optimizer "onebit_adam": Adam whose second moment is frozen after a warm-up, after which ranks
exchange one bit for each element of the momentum (Tang et al. 2021, arXiv:2102.02888, algorithm 1).

    t ≤ freeze_step    m ← β₁ m + (1 - β₁) g,   v ← β₂ v + (1 - β₂) g²,   g: the mean gradient of all ranks
    after it           m ← compressed mean of β₁ m + (1 - β₁) g_i over ranks i,   v stays
    p ← p - lr (m̂ / (√v̂ + eps) + wd p)

with m̂ = m / (1 - β₁ᵗ) and v̂ = v / (1 - β₂^min(t, freeze_step)), or without these divisions.
"""

from collections.abc import Iterable
from typing import Any

import torch

from ...config import OptimizerConfig
from ...optim.optimizers import OPTIMIZERS, Declared
from .compressed_optimizer import CompressedOptimizer
from .phases import Exchange, FrozenVariance, Phases
from .update_rule import OneBitRule

NUMBERS: dict[str, Any] = dict(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)


class OneBitAdam(CompressedOptimizer):
    """1-bit Adam on the parts of parameters that a rank updates."""

    def __init__(self, params: Iterable, phases: Phases, **numbers: Any):
        super().__init__(params, phases, **NUMBERS | numbers)

    def update(self, exchange: Exchange) -> None:
        for group in self.groups_with_parameters():
            descend(self, group, group["params"])


def descend(
    optimizer: CompressedOptimizer, group: dict, parameters: list[torch.Tensor]
) -> None:
    """p ← p - lr (m̂ / (√v̂ + eps) + wd p)."""
    first, second = optimizer.corrections(group)
    if group["weight_decay"]:
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
    torch._foreach_addcdiv_(
        parameters,
        optimizer.tensors(group, "exp_avg"),
        optimizer.denominators(group, second),
        -group["lr"] / first,
    )


def frozen_variance(settings: OptimizerConfig) -> Phases:
    """Return the exchanges of 1-bit Adam and 1-bit LAMB."""
    return FrozenVariance(settings.freeze_step)


def frozen_rule(settings: OptimizerConfig) -> OneBitRule:
    """Return what ranks of 1-bit Adam and 1-bit LAMB exchange."""
    return OneBitRule(frozen_variance(settings))


@OPTIMIZERS.register("onebit_adam", declares=Declared(rule_of=frozen_rule))
def make_onebit_adam(
    groups: list[dict], settings: OptimizerConfig
) -> torch.optim.Optimizer:
    """DeepSpeed's "OneBitAdam"."""
    return OneBitAdam(
        groups,
        frozen_variance(settings),
        lr=0.0,
        eps=settings.adam_eps,
        betas=(settings.adam_beta1, settings.adam_beta2),
        bias_correction=settings.adam_bias_correction,
    )
