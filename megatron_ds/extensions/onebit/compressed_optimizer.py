"""`CompressedOptimizer`: what the optimizers have in common whose data-parallel ranks exchange one bit an
element. They update parts of parameters; `compressed_update.py` exchanges what `phases` asks for.

In a step whose exchange is not `Exchange.FULL`, "exp_avg" has its new value when the step begins, and
gradients are not read.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ...optim.part_optimizer import PartOptimizer, gradient_of
from .phases import Exchange, Phases

Tensors = list[torch.Tensor]


class CompressedOptimizer(PartOptimizer):
    """On flat fp32 tensors. A subclass has the names of its state and `update`.

    phases       what is exchanged in each step
    differs      whether "exp_avg" and sums of updates differ between ranks now
    grad_scale   None or a number: gradients are divided by it while they are read
    parameter.low_grad  optional, a 16-bit tensor of the same length: read in place of `grad`
    """

    STATE: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
    _step_supports_amp_scaling = True  # torch's name for support of `grad_scale`
    takes_numbers = True
    reads_low_grad = True

    def __init__(
        self,
        params: Iterable,
        phases: Phases,
        *,
        bias_correction: bool = True,
        **numbers: Any,
    ):
        super().__init__(params, numbers)
        self.phases = phases
        self.bias_correction = bias_correction
        self.grad_scale: float | None = None
        self.differs = False

    def make_step(self) -> None:
        self.num_updates += 1
        exchange = self.phases.at(self.num_updates)
        if exchange is Exchange.FULL:
            for group in self.param_groups:
                self._update_moments(group)
        self.update(exchange)

    def update(self, exchange: Exchange) -> None:
        """Update the weights of all groups, after the moments."""
        raise NotImplementedError

    def before_exchange(self) -> None:
        """What is compressed in this step will replace "exp_avg"."""

    def after_exchange(self) -> None:
        """The sum of updates, "local_sum", of all ranks has been exchanged (`Exchange.SUM`)."""

    def after_load(self) -> None:
        """State was loaded, and the weights of the model were set from the masters."""

    def numbers(self) -> dict[str, float]:
        """State beside tensors, for checkpoints; equal on all ranks."""
        return {}

    def load_numbers(self, numbers: dict[str, float]) -> None:
        """Restore `numbers`."""

    def numbers_of(self, p: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, [1]) of the numbers of the logical parameter that `p` is a part of: views."""
        return iter(())

    def tensors(self, group: dict, name: str) -> Tensors:
        """Return a state of all parameters of a group, made when it is first asked for."""
        return [self.state_of(p)[name] for p in group["params"]]

    def corrections(self, group: dict) -> tuple[float, float]:
        """1 - β₁ᵗ and 1 - β₂ᵗ for the updates that the moments have had; 1 without bias correction."""
        if not self.bias_correction:
            return 1.0, 1.0
        beta1, beta2 = group["betas"]
        return 1 - beta1**self.num_updates, 1 - beta2 ** self.phases.variance_updates(
            self.num_updates
        )

    def denominators(self, group: dict, second: float) -> Tensors:
        """√(v / second) + eps of all parameters of a group, new tensors; infinite where v is 0.

        An element that had no gradient while v was measured has no step: eps alone would make it enormous.
        """
        roots = list(torch._foreach_sqrt(self.tensors(group, "exp_avg_sq")))
        torch._foreach_mul_(roots, second**-0.5)
        for root in roots:
            root.masked_fill_(root == 0, math.inf)
        torch._foreach_add_(roots, group["eps"])
        return roots

    def groups_with_parameters(self) -> Iterator[dict]:
        """Return the groups that are not empty."""
        return (group for group in self.param_groups if group["params"])

    def _update_moments(self, group: dict) -> None:
        """m ← β₁ m + (1 - β₁) g, v ← β₂ v + (1 - β₂) g²."""
        grads = [_gradient_of(p) for p in group["params"]]
        if not grads:
            return
        (beta1, beta2), scale = group["betas"], self.grad_scale or 1.0
        m = self.tensors(group, "exp_avg")
        v = self.tensors(group, "exp_avg_sq")
        torch._foreach_mul_(m, beta1)
        torch._foreach_add_(m, grads, alpha=(1 - beta1) / scale)
        torch._foreach_mul_(v, beta2)
        torch._foreach_addcmul_(v, grads, grads, (1 - beta2) / scale**2)


def _gradient_of(p: torch.Tensor) -> torch.Tensor:
    gradient = gradient_of(p)
    assert gradient is not None, "a full exchange gives every part its gradient"
    return gradient
