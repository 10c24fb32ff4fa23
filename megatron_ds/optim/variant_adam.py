"""`VariantAdam`: torch's interface to `ops.adam.adam_variant_`: Adam with weight decay in the gradient, or
without bias correction, on any device (DeepSpeed)."""

from collections.abc import Iterable

from ..ops.adam import adam_variant_
from .part_optimizer import PartOptimizer


class VariantAdam(PartOptimizer):
    """`adam_variant_` on fp32 tensors. bias_correction, decoupled: its `corrects` and `decoupled`.

    Names and shapes of its state are those of torch.optim.AdamW.
    """

    STATE = ("exp_avg", "exp_avg_sq")
    COUNTS_STEPS = True

    def __init__(
        self,
        params: Iterable,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        decoupled: bool = True,
    ):
        super().__init__(
            params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        )
        self.bias_correction = bias_correction
        self.decoupled = decoupled

    def make_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    adam_variant_(
                        p,
                        self.count_step(p),
                        group,
                        corrects=self.bias_correction,
                        decoupled=self.decoupled,
                    )
