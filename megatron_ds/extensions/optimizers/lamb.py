"""The optimizer "lamb": Adam whose step is scaled, for each parameter, by the norm of the weight over that of
the update (You et al. 2019, arXiv:1904.00962, algorithm 2).

    m ← β₁ m + (1 - β₁) g            v ← β₂ v + (1 - β₂) g²
    u = m / (√v + eps) + wd p        with the moments corrected first in the form "paper"
    r = ‖p‖ / ‖u‖, 1 if one of them is 0, at least min_coeff, at most max_coeff
    p ← p - lr c r u

    form         c
    "paper"      1
    "deepspeed"  √(1 - β₂ᵗ) / (1 - β₁ᵗ): the correction multiplies the step. As r normalizes u, the first
                 steps are smaller by c: 0.32, 0.15, 0.31, 0.80 at t = 1, 10, 100, 1000 with default betas

The norms are those of the logical parameter, over all its parts. A packed weight, such as that of queries,
keys and values, is one parameter with one r.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...config import OptimizerConfig
from ...optim.optimizers import OPTIMIZERS, Declared, OptimizerTraits
from ...optim.part_optimizer import HalvedOptimizer, gradients_of

Norms = Callable[
    [Sequence[Sequence[torch.Tensor]], Sequence[torch.Tensor]], torch.Tensor
]


NUMBERS = dict(
    lr=1e-3,
    betas=(0.9, 0.999),
    eps=1e-8,
    weight_decay=0.0,
    max_coeff=10.0,
    min_coeff=0.01,
)


@dataclass(frozen=True)
class LambRule:
    """What all groups have in common. bias_correction: off, c is 1 and moments are used as they are.

    eps_inside_sqrt: √(v + eps) in place of √v + eps
    """

    form: str = "deepspeed"
    bias_correction: bool = True
    eps_inside_sqrt: bool = False


class Lamb(HalvedOptimizer):
    """LAMB on contiguous fp32 parts of parameters; a step has one collective call of `reduce_norms`.

    numbers: of all groups that have no others; the defaults are NUMBERS
    reduce_norms(lists, parameters) → [lists, parameters]: norms of the logical parameters that `parameters`
    are parts of, from the tensors of each list. None: each parameter is whole.
    """

    STATE = ("exp_avg", "exp_avg_sq")
    COUNTS_STEPS = True

    def __init__(
        self,
        params: Iterable,
        rule: LambRule = LambRule(),
        reduce_norms: Norms | None = None,
        **numbers: Any,
    ):
        super().__init__(params, NUMBERS | numbers)
        self.rule = rule
        self._reduce_norms = reduce_norms or _norms_of_whole
        self._moving: list[tuple[dict[str, Any], list[torch.Tensor]]] = []

    def make_step(self) -> None:
        """Update the parameters with their gradients. Collective if `reduce_norms` is."""
        self.advance()
        lists, parameters = self.measured()
        self._move(lists[1], self._reduce_norms(lists, parameters))

    # A step in halves, for parameters of which this optimizer has parts only.
    @torch.no_grad()
    def advance(self) -> None:
        """Update the moments with the gradients."""
        self._moving = [
            (group, [p for p in group["params"] if p.grad is not None])
            for group in self.param_groups
        ]
        for group, parameters in self._moving:
            if not parameters:
                continue
            beta1, beta2 = group["betas"]
            grads = gradients_of(parameters)
            states = [self.count_step(p) for p in parameters]
            m, v = (
                [state[name] for state in states] for name in ("exp_avg", "exp_avg_sq")
            )
            torch._foreach_lerp_(m, grads, 1 - beta1)
            torch._foreach_mul_(v, beta2)
            torch._foreach_addcmul_(v, grads, grads, 1 - beta2)

    @torch.no_grad()
    def measured(self) -> tuple[list[list[torch.Tensor]], list[torch.Tensor]]:
        """([p, u], p) of all parameters, after `advance`: the tensors whose norms a step needs."""
        parameters = []
        directions = []
        for group, members in self._moving:
            parameters += members
            if members:
                directions += self._directions(group, members)
        return [parameters, directions], parameters

    @torch.no_grad()
    def finish(self, norms: torch.Tensor) -> None:
        """Move the parameters. norms: [2, parameters] of p and u, whole, in the order of `measured`."""
        self._move(self.measured()[0][1], norms)

    def _move(self, us: Sequence[torch.Tensor], norms: torch.Tensor) -> None:
        of_weights, of_updates = norms
        # r, one number for each part of a parameter, on the device.
        ratios = torch.where(
            (of_weights > 0) & (of_updates > 0), of_weights / of_updates, 1.0
        )
        moves = iter(us)
        of_groups = ratios.split([len(members) for _, members in self._moving])
        for (group, members), of_group in zip(self._moving, of_groups):
            if members:
                _, _, factor = self._corrections(group, members)
                of_members = [next(moves) for _ in members]
                rates = of_group.clamp(group["min_coeff"], group["max_coeff"]) * (
                    -group["lr"] * factor
                )
                torch._foreach_mul_(of_members, list(rates.unbind()))
                torch._foreach_add_(members, of_members)

    def _corrections(
        self, group: dict[str, Any], parameters: Sequence[torch.Tensor]
    ) -> tuple[float, float, float]:
        """Divisors of m and of v, and c."""
        (beta1, beta2), step = group["betas"], self.state[parameters[0]]["step"]
        first, second = (
            (1 - beta1**step, 1 - beta2**step)
            if self.rule.bias_correction
            else (1.0, 1.0)
        )
        if self.rule.form == "deepspeed":
            return 1.0, 1.0, second**0.5 / first
        return first, second, 1.0

    def _directions(
        self, group: dict[str, Any], parameters: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """u of each parameter."""
        (first, second, _), eps = self._corrections(group, parameters), group["eps"]
        m, v = (
            [self.state[p][name] for p in parameters]
            for name in ("exp_avg", "exp_avg_sq")
        )
        # m̂ / (√v̂ + eps), in one buffer beside the state.
        us = list(torch._foreach_mul(v, 1 / second))
        if self.rule.eps_inside_sqrt:
            torch._foreach_add_(us, eps)
        torch._foreach_sqrt_(us)
        if not self.rule.eps_inside_sqrt:
            torch._foreach_add_(us, eps)
        torch._foreach_reciprocal_(us)
        torch._foreach_mul_(us, m)
        torch._foreach_mul_(us, 1 / first)
        if group["weight_decay"]:
            torch._foreach_add_(us, list(parameters), alpha=group["weight_decay"])
        return us


def _norms_of_whole(
    lists: Sequence[Sequence[torch.Tensor]], parameters: Sequence[torch.Tensor]
) -> torch.Tensor:
    if not parameters:
        return torch.zeros(len(lists), 0)
    norms = [torch._foreach_norm(list(tensors), 2, torch.float64) for tensors in lists]
    return torch.stack([torch.stack(list(of_list)).float() for of_list in norms])


@OPTIMIZERS.register(
    "lamb",
    declares=Declared(OptimizerTraits(needs_norms=True, steps_in_halves=True)),
)
def make_lamb(
    groups: list[dict], settings: OptimizerConfig, *, reduce_norms: Norms | None = None
) -> torch.optim.Optimizer:
    """DeepSpeed's "Lamb", or the paper's with `settings.lamb_form`."""
    rule = LambRule(
        settings.lamb_form, settings.adam_bias_correction, settings.lamb_eps_inside_sqrt
    )
    return Lamb(
        groups,
        rule,
        reduce_norms,
        lr=0.0,
        betas=(settings.adam_beta1, settings.adam_beta2),
        eps=settings.adam_eps,
        max_coeff=settings.lamb_max_coeff,
        min_coeff=settings.lamb_min_coeff,
    )
