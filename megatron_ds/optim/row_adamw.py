"""`RowAdamW`: torch's interface to the operation `ops.adam.adamw`, which updates many tensors at once."""

from collections.abc import Iterable, Sequence

import torch

from ..ops.adam import adamw
from ..ops.update_rows import UNCORRECTED, AdamRow, AdamStep
from .row_optimizer import RowOptimizer


class RowAdamW(RowOptimizer):
    """AdamW on contiguous fp32 parameters, for devices with an implementation of `adamw` (`has_kernel`).

    bias_correction  divide the moments by 1 - beta^step, as the algorithm does; else they are used as they
                     are, by the same kernels

    Names and shapes of its state are those of torch.optim.AdamW, so checkpoints are interchangeable; "step"
    is a number, as in earlier versions of torch.

    found_inf  None or an fp32 scalar on the parameters' device: if it is not 0, nothing is updated (steps
               are counted all the same; see `ShardOptimizer.set_num_updates`)
    """

    STATE = ("exp_avg", "exp_avg_sq")
    COUNTS_STEPS = True

    def __init__(
        self,
        params: Iterable,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        bias_correction: bool = True,
    ):
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        self.bias_correction = bias_correction

    def update(
        self, rows: Sequence[AdamRow], group: dict, divisor: float | torch.Tensor
    ) -> None:
        adamw(
            rows[0].grad,
            rows,
            AdamStep(
                float(group["lr"]),
                group["betas"],
                group["eps"],
                group["weight_decay"],
                divisor,
                self.found_inf,
            ),
        )

    def row(self, p: torch.Tensor, grad: torch.Tensor) -> AdamRow:
        """Count a step of the parameter; returns its row for `update`."""
        state = self.count_step(p)
        return AdamRow(
            p,
            grad,
            state["exp_avg"],
            state["exp_avg_sq"],
            state["step"] if self.bias_correction else UNCORRECTED,
            getattr(p, "low", None),
        )


def has_kernel(groups: Iterable[dict]) -> bool:
    """Return whether all parameters of the groups are fp32, on devices with an implementation of `adamw`."""
    parameters = [p for group in groups for p in group["params"]]
    devices = {p.device.type for p in parameters} or {"cpu"}
    return all(p.dtype == torch.float32 for p in parameters) and all(
        adamw.first_choice(device, torch.float32) != "torch" for device in devices
    )
