"""`VariantAdam`: Adam without bias correction, or with weight decay in the gradient (DeepSpeed)."""

from collections.abc import Iterable

import torch

from .part_optimizer import PartOptimizer


class VariantAdam(PartOptimizer):
    """Kingma and Ba 2014 (arXiv:1412.6980), alg. 1, on fp32 tensors, with two choices.

    bias_correction  divide the moments by 1 - beta^step, as the algorithm does
    decoupled        weight decay lowers the weights by themselves (AdamW); otherwise it is added to the
                     gradient (L2 regularization), and so divided by the root of the second moment

    Names and shapes of its state are those of torch.optim.AdamW.
    """

    STATE = ("exp_avg", "exp_avg_sq")
    COUNTS_STEPS = True

    def __init__(self, params: Iterable, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
                 eps: float = 1e-8, weight_decay: float = 0.0, *, bias_correction: bool = True,
                 decoupled: bool = True):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
        self.bias_correction, self.decoupled = bias_correction, decoupled

    def make_step(self) -> None:
        """See `PartOptimizer.make_step`."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, group)

    def _update(self, p: torch.Tensor, group: dict) -> None:
        state, (beta1, beta2), decay = self.count_step(p), group["betas"], group["weight_decay"]
        step, m, v, g = state["step"], state["exp_avg"], state["exp_avg_sq"], p.grad
        if decay and self.decoupled:
            p.mul_(1 - group["lr"] * decay)
        elif decay:
            g = g.add(p, alpha=decay)
        m.lerp_(g, 1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        first, second = (1 - beta1**step, 1 - beta2**step) if self.bias_correction else (1.0, 1.0)
        p.addcdiv_(m, (v / second).sqrt_().add_(group["eps"]), value=-group["lr"] / first)
