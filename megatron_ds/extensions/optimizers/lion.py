"""The optimizer "lion": the sign of a momentum (Chen et al. 2023, arXiv:2302.06675, algorithm 2)."""

from collections.abc import Iterable, Sequence

import torch

from ...config import OptimizerConfig
from ...ops.update_rows import UpdateRow
from ...optim.optimizers import OPTIMIZERS
from ...optim.row_optimizer import RowOptimizer
from .elementwise_updates import LionStep, lion


class Lion(RowOptimizer):
    """p ← p (1 - lr wd) - lr sign(β₁ m + (1 - β₁) g), m ← β₂ m + (1 - β₂) g; sign(0) = 0.

    Its learning rate is some 3 to 10 times smaller than Adam's, its weight decay as much larger (section 5).
    """

    STATE = ("exp_avg",)

    def __init__(
        self,
        params: Iterable,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ):
        super().__init__(params, lr=lr, betas=betas, weight_decay=weight_decay)

    def update(
        self, rows: Sequence[UpdateRow], group: dict, divisor: float | torch.Tensor
    ) -> None:
        lion(
            rows[0].grad,
            rows,
            LionStep(
                group["lr"], group["betas"], group["weight_decay"], float(divisor)
            ),
        )

    def row(self, p: torch.Tensor, grad: torch.Tensor) -> UpdateRow:
        return UpdateRow(p, grad, self.state_of(p)["exp_avg"], getattr(p, "low", None))


@OPTIMIZERS.register("lion")
def make_lion(groups: list[dict], settings: OptimizerConfig) -> torch.optim.Optimizer:
    """Megatron's "lion", with its default betas; the paper's are 0.9 and 0.99."""
    return Lion(groups, lr=0.0, betas=(settings.lion_beta1, settings.lion_beta2))
