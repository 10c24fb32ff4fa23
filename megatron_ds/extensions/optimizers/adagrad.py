"""The optimizer "adagrad": steps divided by the root of the sum of all squared gradients (Duchi et al. 2011)."""

from collections.abc import Iterable, Sequence

import torch

from ...config import OptimizerConfig
from ...ops.update_rows import UpdateRow
from ...optim.optimizers import OPTIMIZERS
from ...optim.row_optimizer import RowOptimizer
from .elementwise_updates import AdagradStep, adagrad


class Adagrad(RowOptimizer):
    """g ← g + wd p, s ← s + g², p ← p - lr g / (√s + eps).

    torch.optim.Adagrad without its decay of the learning rate and its first accumulator; the state has its
    name, "sum".
    """

    STATE = ("sum",)

    def __init__(
        self,
        params: Iterable,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
    ):
        super().__init__(params, lr=lr, eps=eps, weight_decay=weight_decay)

    def update(
        self, rows: Sequence[UpdateRow], group: dict, divisor: float | torch.Tensor
    ) -> None:
        decay = group["weight_decay"]
        how = AdagradStep(group["lr"], group["eps"], decay, float(divisor))
        adagrad(rows[0].grad, rows, how)

    def row(self, p: torch.Tensor, grad: torch.Tensor) -> UpdateRow:
        return UpdateRow(p, grad, self.state_of(p)["sum"], getattr(p, "low", None))


@OPTIMIZERS.register("adagrad")
def make_adagrad(
    groups: list[dict], settings: OptimizerConfig
) -> torch.optim.Optimizer:
    """DeepSpeed's "Adagrad"."""
    return Adagrad(groups, lr=0.0, eps=settings.adagrad_eps)
