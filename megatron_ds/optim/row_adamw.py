"""`RowAdamW`: torch's interface to the operation `ops.adam.adamw`, which updates many tensors at once."""

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable

import torch

from ..host.memory_maps import huge_page_zeros
from ..ops.adam import AdamRow, AdamStep, adamw

MOMENTS = ("exp_avg", "exp_avg_sq")


class RowAdamW(torch.optim.Optimizer):
    """AdamW on contiguous fp32 parameters, for devices with an implementation of `adamw` (`has_kernel`).

    Names and shapes of its state are those of torch.optim.AdamW, so checkpoints are interchangeable; "step"
    is a number, as in earlier versions of torch. A step makes a launch or two for each parameter group, and
    the host does not wait for a GPU.

    grad_scale            None, a number, or an fp32 scalar on the parameters' device: each gradient is
                          divided by it while it is read, and not written
    found_inf             None or an fp32 scalar on that device: if it is not 0, nothing is updated (steps
                          are counted all the same; see `ShardOptimizer.set_num_updates`)
    parameter.low         optional, a 16-bit tensor of the same length: receives the updated value, rounded
    parameter.low_grad    optional, a 16-bit tensor of the same length, used instead of `grad`
    """

    _step_supports_amp_scaling = True      # torch's name for support of `grad_scale` and `found_inf`
    takes_numbers = True                   # as grad_scale
    writes_low = True
    reads_low_grad = True

    def __init__(self, params: Iterable, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
                 eps: float = 1e-8, weight_decay: float = 0.01):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
        self.grad_scale: float | torch.Tensor | None = None
        self.found_inf: torch.Tensor | None = None

    def add_param_group(self, param_group: dict) -> None:
        """Torch's method without its decorator, whose first call imports the compiler: more than a second."""
        inspect.unwrap(torch.optim.Optimizer.add_param_group)(self, param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], torch.Tensor] | None = None) -> torch.Tensor | None:
        """Update the parameters; returns the loss of `closure`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        divisor = 1.0 if self.grad_scale is None else self.grad_scale
        for group in self.param_groups:
            how = AdamStep(float(group["lr"]), group["betas"], group["eps"], group["weight_decay"], divisor,
                           self.found_inf)
            for rows in self._rows_by_device(group["params"]).values():
                adamw(rows[0].grad, rows, how)
        return loss

    def _rows_by_device(self, parameters: Iterable[torch.Tensor]) -> dict[torch.device, list[AdamRow]]:
        rows = defaultdict(list)
        for p in parameters:
            low_grad = getattr(p, "low_grad", None)
            if (grad := p.grad if low_grad is None else low_grad) is not None:
                rows[p.device].append(self._row(p, grad))
        return rows

    def _row(self, p: torch.Tensor, grad: torch.Tensor) -> AdamRow:
        state = self.state[p]
        if not state:
            state["step"] = 0
            for moment in MOMENTS:
                state[moment] = huge_page_zeros(p.numel(), device=p.device).view(p.shape)
        state["step"] = step = int(state["step"]) + 1        # loaded from torch's optimizer it is a tensor
        return AdamRow(p, grad, state["exp_avg"], state["exp_avg_sq"], step, getattr(p, "low", None))


def has_kernel(groups: Iterable[dict]) -> bool:
    """Whether all parameters of the groups are fp32, on devices with an implementation of `adamw`."""
    parameters = [p for group in groups for p in group["params"]]
    devices = {p.device.type for p in parameters} or {"cpu"}
    return (all(p.dtype == torch.float32 for p in parameters)
            and all(adamw.first_choice(device, torch.float32) != "torch" for device in devices))
