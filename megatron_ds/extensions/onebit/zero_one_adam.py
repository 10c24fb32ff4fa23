"""The optimizer "zero_one_adam": Adam whose ranks exchange compressed gradients, and later the compressed
sums of some steps that each rank makes by itself (Lu et al. 2022, arXiv:2202.06009, algorithm 1).

    t ≤ var_freeze_step    g: the mean gradient of all ranks, in full precision at refreshes, else compressed
                           m ← β₁ m + (1 - β₁) g;   v ← β₂ v + (1 - β₂) g² at refreshes
                           p ← p - lr (m̂ / (√v̂ + eps) + wd p)
    after it               on rank i, with γ = lr / (1 - β₁ᵗ) and its own gradient g_i:
                           m_i ← β₁ m_i + (1 - β₁) g_i,   u_i ← u_i + γ m_i,   Γ ← Γ + γ,   p ← p - lr wd p
                           weights of the model: p - u_i / (√v̂ + eps)
    at an exchange         u ← compressed mean of u_i,   m ← u / Γ,   p ← p - u / (√v̂ + eps);   u, Γ ← 0

p is a master that all ranks have alike at all times: weight decay is applied to it and is not compressed, and
there is nothing to take back at an exchange, so copies cannot drift apart by rounding.
"""

from collections.abc import Iterable
from typing import Any

import torch

from ...config import OptimizerConfig
from ...optim.optimizers import OPTIMIZERS, Declared
from .adam import NUMBERS, descend
from .compressed_optimizer import CompressedOptimizer
from .phases import Exchange, Phases, ZeroOnePhases
from .update_rule import OneBitRule

RATES = "sum_of_rates"


class ZeroOneAdam(CompressedOptimizer):
    """0/1 Adam on whole parameters, which are masters.

    parameter.low  the weight of the model, of any dtype
    """

    STATE = ("exp_avg", "exp_avg_sq", "local_sum")
    writes_low = True

    def __init__(self, params: Iterable, phases: Phases, **numbers: Any):
        super().__init__(params, phases, **NUMBERS | numbers)
        for group in self.param_groups:
            group.setdefault(RATES, 0.0)

    def update(self, exchange: Exchange) -> None:
        self.differs = exchange in (Exchange.SUM, Exchange.NONE)
        for group in self.param_groups:
            parameters = group["params"]
            if not self.differs:
                if parameters:
                    descend(self, group, parameters)
                    write_low(parameters, parameters)
                continue
            rate = group["lr"] / self.corrections(group)[0]
            group[RATES] += rate
            if parameters:
                torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(
                    self.tensors(group, "local_sum"),
                    self.tensors(group, "exp_avg"),
                    alpha=rate,
                )
            if exchange is Exchange.NONE and parameters:
                self._show(group)

    def after_exchange(self) -> None:
        self.differs = not all(group[RATES] for group in self.param_groups)
        for group in self.param_groups:
            rates, group[RATES] = group[RATES], 0.0
            if not group["params"]:
                continue
            sums = self.tensors(group, "local_sum")
            m = self.tensors(group, "exp_avg")
            torch._foreach_addcdiv_(
                group["params"], sums, self._denominators(group), -1.0
            )
            # With learning rates of zero there is no sum; each rank keeps its momentum.
            if rates:
                torch._foreach_copy_(m, torch._foreach_div(sums, rates))
            torch._foreach_zero_(sums)
            write_low(group["params"], group["params"])

    def after_load(self) -> None:
        for group in self.groups_with_parameters():
            self._show(group)

    def numbers(self) -> dict[str, float]:
        return {
            f"{RATES}_{i}": group[RATES] for i, group in enumerate(self.param_groups)
        }

    def load_numbers(self, numbers: dict[str, float]) -> None:
        for i, group in enumerate(self.param_groups):
            group[RATES] = numbers.get(f"{RATES}_{i}", 0.0)

    def _denominators(self, group: dict) -> list[torch.Tensor]:
        return self.denominators(group, self.corrections(group)[1])

    def _show(self, group: dict) -> None:
        """Write the weights with which this rank computes."""
        if self.num_updates:
            steps = torch._foreach_div(
                self.tensors(group, "local_sum"), self._denominators(group)
            )
            write_low(group["params"], torch._foreach_sub(group["params"], steps))


def write_low(
    parameters: Iterable[torch.Tensor], values: Iterable[torch.Tensor]
) -> None:
    """Write the weights of the model, where they are not the parameters themselves."""
    written: list[torch.Tensor] = []
    read: list[torch.Tensor] = []
    for p, value in zip(parameters, values):
        low: torch.Tensor | None = getattr(p, "low", None)
        if low is not None:
            written.append(low)
            read.append(value)
    if written:
        torch._foreach_copy_(written, read)


def zero_one_phases(settings: OptimizerConfig) -> Phases:
    """Return the exchanges of 0/1 Adam."""
    return ZeroOnePhases(
        settings.var_freeze_step,
        settings.var_update_scaler,
        settings.local_step_scaler,
        settings.local_step_clipper,
    )


def zero_one_rule(settings: OptimizerConfig) -> OneBitRule:
    """Return what ranks of 0/1 Adam exchange."""
    return OneBitRule(zero_one_phases(settings))


@OPTIMIZERS.register("zero_one_adam", declares=Declared(rule_of=zero_one_rule))
def make_zero_one_adam(
    groups: list[dict], settings: OptimizerConfig
) -> torch.optim.Optimizer:
    """DeepSpeed's "ZeroOneAdam"."""
    return ZeroOneAdam(
        groups,
        zero_one_phases(settings),
        lr=0.0,
        eps=settings.adam_eps,
        betas=(settings.adam_beta1, settings.adam_beta2),
        bias_correction=settings.adam_bias_correction,
    )
