"""The optimizer "onebit_lamb": LAMB whose second moment is frozen after a warm-up, after which ranks exchange
one bit for each element of the momentum (Li et al. 2021, arXiv:2104.06069, algorithm 1).

    t ≤ freeze_step    LAMB (optimizers/lamb.py): p ← p - lr k r u with u = m / (√v + eps) + wd p; and the mean of
                       its ratios, c ← coeff_beta c + (1 - coeff_beta) r, of those that are not 1
    after it           m ← compressed mean of β₁ m + (1 - β₁) g_i over ranks i,   v stays
                       ĝ = (m_t - β₁ m_{t-1}) / (1 - β₁),   v' ← β₂ v' + (1 - β₂) ĝ²,   v' = v at first
                       f = largest of (√v + eps) / (√v' + eps) over the elements of the parameter
                       f ← f ρ + 1 - ρ with ρ = min(1, ‖m / (√v + eps)‖ / ‖u‖)
                       f ← f between factor_min and factor_max, within factor_threshold of the last f
                       p ← p - lr k c f u

k = √(1 - β₂ⁿ) / (1 - β₁ᵗ) with n updates of v, or 1 without bias correction. Norms, ratios and f are those of
the logical parameter. Elements that never had a gradient are no elements of f.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ...config import OptimizerConfig
from ...optim.optimizers import OPTIMIZERS, Declared, OptimizerTraits
from ..optimizers.lamb import NUMBERS as LAMB_NUMBERS
from .adam import frozen_rule, frozen_variance
from .compressed_optimizer import CompressedOptimizer, Tensors
from .phases import Exchange, Phases


class Reductions(Protocol):
    """`zero.norm.ParameterNorms`."""

    def __call__(
        self,
        lists: Sequence[Sequence[torch.Tensor]],
        parameters: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        """Norms of logical parameters."""

    def largest(
        self, values: torch.Tensor, parameters: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Maxima over the parts of logical parameters."""


@dataclass(frozen=True)
class CoefficientRule:
    """How ratios and factors are limited; see the options of these names."""

    coeff_beta: float = 0.9
    factor_max: float = 4.0
    factor_min: float = 0.5
    factor_threshold: float = 0.1


class OneBitLamb(CompressedOptimizer):
    """1-bit LAMB on the parts of parameters that a rank updates. Collective, see `reduce_norms`.

    coefficients  c, and the last factor f, of the parameters of all groups in order: fp32 [2, parameters]
    """

    STATE = ("exp_avg", "exp_avg_sq", "exp_avg_sq_fresh")

    def __init__(
        self,
        params: Iterable,
        phases: Phases,
        rule: CoefficientRule = CoefficientRule(),
        reduce_norms: Reductions | None = None,
        **numbers: Any,
    ):
        given: dict[str, Any] = {**LAMB_NUMBERS, **numbers}
        super().__init__(params, phases, **given)
        self.rule = rule
        self._reduce = reduce_norms or WholeParameterNorms()
        count = sum(len(group["params"]) for group in self.param_groups)
        device = next(
            (p.device for group in self.param_groups for p in group["params"]), None
        )
        self.coefficients = torch.zeros(2, count, device=device)
        self.restart()
        self._before: dict[int, torch.Tensor] = {}
        self._us: list[list[torch.Tensor]] = []

    def restart(self) -> None:
        """The state with which a run begins: no mean ratio, a factor of 1."""
        self.coefficients[0], self.coefficients[1] = 0.0, 1.0

    def before_exchange(self) -> None:
        self._before = {
            id(p): self.state_of(p)["exp_avg"].clone() for p in self._parameters
        }

    def update(self, exchange: Exchange) -> None:
        if exchange is Exchange.FULL:
            rates = self._ratios()
        else:
            self._refresh_variance()
            rates = self._factors()
        at = 0
        for group, us in zip(self.param_groups, self._us):
            count = len(group["params"])
            if count:
                first, second = self.corrections(group)
                steps = rates[at : at + count] * (-group["lr"] * second**0.5 / first)
                torch._foreach_mul_(us, list(steps.unbind()))
                torch._foreach_add_(group["params"], us)
                at += count
        self._us = []
        self._before = {}

    def numbers_of(self, p: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        i = next(i for i, q in enumerate(self._parameters) if q is p)
        yield "mean_ratio", self.coefficients[0, i : i + 1]
        yield "last_factor", self.coefficients[1, i : i + 1]

    @property
    def _parameters(self) -> Tensors:
        return [p for group in self.param_groups for p in group["params"]]

    def _ratios(self) -> torch.Tensor:
        """Trust ratios, and their running means; the second moment is followed by its fresh copy."""
        # The updates u, and a fresh copy of the second moment.
        self._us = [self._directions(group) for group in self.param_groups]
        for us, group in zip(self._us, self.param_groups):
            if us:
                decayed(us, group)
                torch._foreach_copy_(
                    self.tensors(group, "exp_avg_sq_fresh"),
                    self.tensors(group, "exp_avg_sq"),
                )
        # The trust ratio of each parameter, within the bounds of its group.
        of_weights, of_updates = self._reduce(
            [self._parameters, sum(self._us, [])], self._parameters
        )
        ratios = torch.where(
            (of_weights > 0) & (of_updates > 0), of_weights / of_updates, 1.0
        )
        of_groups = ratios.split([len(group["params"]) for group in self.param_groups])
        ratios = torch.cat(
            [
                r.clamp(group["min_coeff"], group["max_coeff"])
                for r, group in zip(of_groups, self.param_groups)
            ]
        )
        # Ratios of 1 are of parameters without weights or updates: no part of the mean.
        means = self.coefficients[0]
        means.copy_(
            torch.where(
                ratios == 1, means, means.lerp(ratios, 1 - self.rule.coeff_beta)
            )
        )
        return ratios

    def _factors(self) -> torch.Tensor:
        """Return the mean ratios times the factors of this step."""
        self._us = [self._directions(group) for group in self.param_groups]
        before_decay = [u.clone() for us in self._us for u in us]
        for us, group in zip(self._us, self.param_groups):
            if us:
                decayed(us, group)
        # Norms of the directions without and with weight decay, over all ranks.
        parameters = self._parameters
        bare, whole = self._reduce([before_decay, sum(self._us, [])], parameters)
        largest = []
        for group in self.param_groups:
            largest += [self._excess(p, group["eps"]) for p in group["params"]]
        factors = self._reduce.largest(
            torch.stack(largest) if largest else bare, parameters
        )
        # The factors apply to the share of the directions; they change slowly, within bounds.
        share = torch.where(whole > 0, bare / whole, 1.0).clamp_(max=1.0)
        factors = factors * share + 1 - share
        rule = self.rule
        last = self.coefficients[1]
        factors = factors.clamp(rule.factor_min, rule.factor_max)
        factors = factors.clamp(
            last * (1 - rule.factor_threshold), last * (1 + rule.factor_threshold)
        )
        last.copy_(factors)
        return self.coefficients[0] * factors

    def _directions(self, group: dict) -> Tensors:
        """m / (√v + eps), new tensors."""
        if not group["params"]:
            return []
        us = self.denominators(group, 1.0)
        torch._foreach_reciprocal_(us)
        torch._foreach_mul_(us, self.tensors(group, "exp_avg"))
        return us

    def _excess(self, p: torch.Tensor, eps: float) -> torch.Tensor:
        """Return the largest (√v + eps) / (√v' + eps) of a part."""
        state = self.state_of(p)
        v = state["exp_avg_sq"]
        fresh = state["exp_avg_sq_fresh"]
        ratio = (v.sqrt() + eps).div_(fresh.sqrt().add_(eps))
        return ratio.mul_(v > 0).max()

    def _refresh_variance(self) -> None:
        """v' from the gradient that follows from two momenta."""
        for group in self.groups_with_parameters():
            beta1, beta2 = group["betas"]
            grads = [self._before[id(p)] for p in group["params"]]
            torch._foreach_mul_(grads, -beta1)
            torch._foreach_add_(grads, self.tensors(group, "exp_avg"))
            fresh = self.tensors(group, "exp_avg_sq_fresh")
            torch._foreach_mul_(fresh, beta2)
            torch._foreach_addcmul_(fresh, grads, grads, (1 - beta2) / (1 - beta1) ** 2)


def decayed(us: Tensors, group: dict) -> None:
    """u ← u + wd p."""
    if group["weight_decay"]:
        torch._foreach_add_(us, list(group["params"]), alpha=group["weight_decay"])


class WholeParameterNorms:
    """`Reductions` where each parameter is whole."""

    def __call__(
        self,
        lists: Sequence[Sequence[torch.Tensor]],
        parameters: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        """Norms, fp32 [lists, parameters]."""
        norms = [
            torch._foreach_norm(list(tensors), 2, torch.float64) for tensors in lists
        ]
        return torch.stack([torch.stack(list(of_list)).float() for of_list in norms])

    def largest(
        self, values: torch.Tensor, parameters: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Return the values themselves."""
        return values


@OPTIMIZERS.register(
    "onebit_lamb",
    declares=Declared(OptimizerTraits(needs_norms=True), rule_of=frozen_rule),
)
def make_onebit_lamb(
    groups: list[dict],
    settings: OptimizerConfig,
    *,
    reduce_norms: Reductions | None = None,
) -> torch.optim.Optimizer:
    """DeepSpeed's "OneBitLamb"."""
    rule = CoefficientRule(
        settings.coeff_beta,
        settings.factor_max,
        settings.factor_min,
        settings.factor_threshold,
    )
    return OneBitLamb(
        groups,
        frozen_variance(settings),
        rule,
        reduce_norms,
        lr=0.0,
        eps=settings.adam_eps,
        max_coeff=settings.lamb_max_coeff,
        min_coeff=settings.lamb_min_coeff,
        betas=(settings.adam_beta1, settings.adam_beta2),
        bias_correction=settings.adam_bias_correction,
    )
