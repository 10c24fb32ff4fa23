"""`CpuAdamW`: torch's interface to the CPU update of ops/adam.py, with the same state as torch.optim.AdamW.

State names and shapes (step, exp_avg, exp_avg_sq) are those of torch.optim.AdamW, so checkpoints are
interchangeable.
"""

import inspect
from collections.abc import Callable, Iterable

import torch

from ..host.memory_maps import huge_page_zeros
from ..ops.adam import AdamRow, adamw_


class CpuAdamW(torch.optim.Optimizer):
    """AdamW on contiguous fp32 CPU parameters. Needs the extension (`ops.adam.extension()`).

    grad_scale         None or a tensor: each gradient is divided by it while it is read. Gradients are not
                       written
    parameter.low      optional attribute, a 16-bit tensor of the same length: receives the updated value,
                       rounded
    threads, variant   as in `ops.adam.adamw_`
    """

    _step_supports_amp_scaling = True      # torch's name for support of `grad_scale`
    writes_low = True

    def __init__(self, params: Iterable, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
                 eps: float = 1e-8, weight_decay: float = 0.01, *, threads: int | None = None,
                 variant: str = ""):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
        self.threads, self.variant = threads, variant
        self.grad_scale: torch.Tensor | None = None

    def add_param_group(self, param_group: dict) -> None:
        """Torch's method without its decorator, whose first call imports the compiler: more than a second at
        start-up."""
        inspect.unwrap(torch.optim.Optimizer.add_param_group)(self, param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], torch.Tensor] | None = None) -> torch.Tensor | None:
        """One update; returns the loss of `closure`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scale = 1.0 if self.grad_scale is None else 1.0 / float(self.grad_scale)
        for group in self.param_groups:
            rows = [self._row(p) for p in group["params"] if p.grad is not None]
            adamw_(rows, lr=float(group["lr"]), betas=group["betas"], eps=group["eps"],
                   weight_decay=group["weight_decay"], grad_scale=scale, threads=self.threads,
                   variant=self.variant)
        return loss

    def _row(self, p: torch.Tensor) -> AdamRow:
        state = self.state[p]
        if not state:
            state["step"] = torch.zeros(())
            for moment in ("exp_avg", "exp_avg_sq"):
                state[moment] = huge_page_zeros(p.numel()).view(p.shape)
        state["step"] += 1
        return AdamRow(p, p.grad, state["exp_avg"], state["exp_avg_sq"], int(state["step"]),
                       getattr(p, "low", None))
