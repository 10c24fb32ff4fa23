"""The optimizer "ademamix": Adam with a second, slow momentum (Pagliardini et al. 2024, arXiv:2409.03137).

    m ← β₁ m + (1 - β₁) g      s ← β₃ s + (1 - β₃) g      v ← β₂ v + (1 - β₂) g²
    p ← p - lr ((m / (1 - β₁ᵗ) + α s) / (√v / √(1 - β₂ᵗ) + eps) + wd p)

Algorithm 1 of the paper, with the warm-ups of section 3: α grows linearly, and β₃ from β₁ so that the half-life of the
slow momentum grows linearly. Names and defaults are those of swiss-ai's fork of Megatron-LM.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...config import OptimizerConfig
from ...optim.optimizers import OPTIMIZERS
from ...optim.part_optimizer import PartOptimizer, gradients_of
from .elementwise_updates import AT_A_TIME, roots

NUMBERS = dict(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
LEAST = 1e-8  # added to β in its half-life, so that β₁ = 0 has one


@dataclass(frozen=True)
class SlowMomentum:
    """The numbers of the slow momentum, which all groups have in common.

    alpha                     weight of the momentum in the step
    beta                      its decay rate
    alpha_warmup, beta_warmup   steps in which they grow; below 1: they do not
    """

    alpha: float = 5.0
    beta: float = 0.999
    alpha_warmup: int = -1
    beta_warmup: int = -1

    def alpha_at(self, step: int) -> float:
        """Return α of a step, counted from 1."""
        if step >= self.alpha_warmup:
            return self.alpha
        return self.alpha * step / self.alpha_warmup

    def beta_at(self, step: int, first: float) -> float:
        """Return β₃ of a step, counted from 1. first: the decay rate of the fast momentum, with which it begins."""
        if step >= self.beta_warmup:
            return self.beta
        done = step / self.beta_warmup
        steps = (1 - done) * _half_life(first) + done * _half_life(self.beta)
        return 0.5 ** (1 / (steps + 1))


def _half_life(beta: float) -> float:
    """Return the steps, less one, in which a momentum halves."""
    return math.log(0.5) / math.log(beta + LEAST) - 1


class AdEMAMix(PartOptimizer):
    """AdEMAMix on fp32 parameters or parts of them; elements are updated by themselves.

    slow: of all groups; numbers: of all groups that have no others, NUMBERS by default
    """

    STATE = ("exp_avg", "exp_avg_slow", "exp_avg_sq")
    COUNTS_STEPS = True

    def __init__(
        self, params: Iterable, slow: SlowMomentum = SlowMomentum(), **numbers: Any
    ):
        super().__init__(params, NUMBERS | numbers)
        self.slow = slow

    def make_step(self) -> None:
        """Update the parameters with their gradients."""
        for group in self.param_groups:
            waiting = [p for p in group["params"] if p.grad is not None]
            # Parameters of a group have made equally many steps, unless one had no gradient before.
            by_step: dict[int, list[torch.Tensor]] = {}
            for p in waiting:
                by_step.setdefault(self.count_step(p)["step"], []).append(p)
            for step, parameters in by_step.items():
                for some in _at_a_time(parameters):
                    self._move(some, group, step)

    def _move(
        self, parameters: Sequence[torch.Tensor], group: dict[str, Any], step: int
    ) -> None:
        """Update parameters that make the step of this number."""
        beta1, beta2 = group["betas"]
        grads = gradients_of(parameters)
        fast, slow, squares = (
            [self.state[p][name] for p in parameters] for name in self.STATE
        )
        # The moments.
        slow_beta = self.slow.beta_at(step, beta1)
        torch._foreach_lerp_(fast, grads, 1 - beta1)
        torch._foreach_lerp_(slow, grads, 1 - slow_beta)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)
        # The update.
        divisors = roots(squares)
        torch._foreach_div_(divisors, math.sqrt(1 - beta2**step))
        torch._foreach_add_(divisors, group["eps"])
        updates = torch._foreach_div(fast, 1 - beta1**step)
        torch._foreach_add_(updates, slow, alpha=self.slow.alpha_at(step))
        torch._foreach_div_(updates, divisors)
        torch._foreach_add_(updates, list(parameters), alpha=group["weight_decay"])
        torch._foreach_add_(list(parameters), updates, alpha=-group["lr"])


def _at_a_time(parameters: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield the parameters in lists whose temporaries fit into memory."""
    some: list[torch.Tensor] = []
    for p in parameters:
        some.append(p)
        if sum(each.numel() for each in some) >= AT_A_TIME:
            yield some
            some = []
    if some:
        yield some


@OPTIMIZERS.register("ademamix")
def make_ademamix(
    groups: list[dict], settings: OptimizerConfig
) -> torch.optim.Optimizer:
    """swiss-ai's "ademamix"."""
    slow = SlowMomentum(
        settings.ademamix_alpha,
        settings.ademamix_beta3,
        settings.ademamix_alpha_warmup,
        settings.ademamix_beta3_warmup,
    )
    betas = (settings.adam_beta1, settings.adam_beta2)
    return AdEMAMix(groups, slow, lr=0.0, betas=betas, eps=settings.adam_eps)
