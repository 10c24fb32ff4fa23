"""One AdamW update of flat fp32 tensors; and Adam with the names and arguments of DeepSpeed's classes.

Implementations: a pass over memory, by kernels (extensions/kernels) of CPUs and GPUs, with the bits of the
reference in torch's operations. `optim/row_adamw.py` is torch's interface to them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .. import foreign_name
from ..errors import ConfigError
from .kernel_table import Operation, random_generator
from .update_rows import AdamRow, AdamStep, fp32


@Operation
def adamw(grad: torch.Tensor, rows: Sequence[AdamRow], how: AdamStep) -> None:
    """Update the rows in place. grad: of the first row; its device chooses the implementation.

    Loshchilov and Hutter 2019 (arXiv:1711.05101), alg. 2.
    """
    if how.skip is None or not how.skip:
        reference_adamw_(
            rows,
            lr=how.lr,
            betas=how.betas,
            eps=how.eps,
            weight_decay=how.weight_decay,
            grad_scale=how.grad_scale,
        )


adamw.benchmark_sizes = (
    (8192, 4096),
    (317_383, 4096),
)  # 34 million parameters, 1.3 billion


@adamw.example
def _example(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> tuple:
    draw = random_generator(device, 4 * rows * width)
    made = []
    for step, n in ((1, rows * width), (5, width)):
        p, grad, m, v = (
            torch.rand(n, generator=draw, device=draw.device).to(device)
            for _ in range(4)
        )
        low = None
        if dtype != torch.float32:
            low = torch.zeros(n, dtype=dtype, device=device)
        made.append(AdamRow(p, grad, m, v, step, low))
    return made[0].grad, made, AdamStep(0.1, (0.9, 0.95), 1e-8, 0.1, divisor=1.5)


@torch.no_grad()
def reference_adamw_(
    rows: Sequence[AdamRow],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    grad_scale: float = 1.0,
) -> None:
    """Update each row with gradient * grad_scale. Loshchilov and Hutter 2019 (arXiv:1711.05101), alg. 2."""
    for r in rows:
        beta1, beta2 = betas
        g = r.grad.float() * fp32(grad_scale)
        r.m.add_((g - r.m) * fp32(1 - beta1))
        r.v.mul_(fp32(beta2)).add_(g * g * fp32(1 - beta2))
        # In double: torch's root of a long fp32 tensor may be MKL's, which is not rounded to nearest.
        root = r.v.double().sqrt().float()
        denominator = root * fp32((1 - beta2**r.step) ** -0.5) + fp32(eps)
        r.p.mul_(fp32(1 - lr * weight_decay)).sub_(
            r.m / denominator * fp32(lr / (1 - beta1**r.step))
        )
        if r.low is not None:
            r.low.copy_(r.p)


def adam_variant_(
    p: torch.Tensor,
    state: dict[str, Any],
    group: Mapping[str, Any],
    *,
    corrects: bool,
    decoupled: bool,
) -> None:
    """One update of p by p.grad. Kingma and Ba 2014 (arXiv:1412.6980), alg. 1, with two choices.

    state      {"step": number of this update, from 1, "exp_avg", "exp_avg_sq"} of p
    group      {"lr", "betas", "eps", "weight_decay"}
    corrects   divide the moments by 1 - beta^step, as the algorithm does
    decoupled  weight decay lowers the weights by themselves (AdamW); otherwise it is added to the gradient
               (L2 regularization), and so divided by the root of the second moment
    """
    (beta1, beta2), decay = group["betas"], group["weight_decay"]
    step = state["step"]
    m = state["exp_avg"]
    v = state["exp_avg_sq"]
    g = p.grad
    assert g is not None, "only parameters with gradients are updated"
    if decay and decoupled:
        p.mul_(1 - group["lr"] * decay)
    elif decay:
        g = g.add(p, alpha=decay)
    m.lerp_(g, 1 - beta1)
    v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    first, second = (1 - beta1**step, 1 - beta2**step) if corrects else (1.0, 1.0)
    p.addcdiv_(m, (v / second).sqrt_().add_(group["eps"]), value=-group["lr"] / first)


def __getattr__(name: str) -> Any:
    return foreign_name(__name__, name)


class FusedAdam(torch.optim.Adam):
    """torch's Adam with the name and arguments of DeepSpeed's FusedAdam; an engine runs it on its shards.

    bias_correction: False uses the moments as they are. adam_w_mode: weight decay is decoupled (AdamW).
    set_grad_none has no effect. Raises ConfigError for amsgrad without bias correction.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ):
        if amsgrad and not bias_correction:
            raise ConfigError(
                f"{type(self).__name__}(amsgrad=True, bias_correction=False) is not supported: "
                "AMSGrad is torch's, which corrects its moments. Leave out one of the two."
            )
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            decoupled_weight_decay=adam_w_mode,
        )
        self.bias_correction = bias_correction

    @torch.no_grad()
    def step(  # type: ignore[override]  # torch's stubs have float for what is a tensor
        self, closure: Callable[[], torch.Tensor] | None = None
    ) -> torch.Tensor | None:
        """Update the parameters; returns the loss of `closure`."""
        if self.bias_correction:
            return super().step(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p] = self.state[p] or {
                        "step": 0,
                        "exp_avg": torch.zeros_like(p),
                        "exp_avg_sq": torch.zeros_like(p),
                    }
                    state["step"] = int(state["step"]) + 1
                    adam_variant_(
                        p,
                        state,
                        group,
                        corrects=False,
                        decoupled=group["decoupled_weight_decay"],
                    )
        return loss


class DeepSpeedCPUAdam(FusedAdam):
    """`FusedAdam` with DeepSpeed's CPU Adam's arguments. "offload_optimizer" places its state."""

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ):
        if not fp32_optimizer_states:
            raise ConfigError(
                "DeepSpeedCPUAdam(fp32_optimizer_states=False) is not supported: states are "
                "fp32. Leave the argument out."
            )
        super().__init__(
            model_params,
            lr,
            bias_correction,
            betas,
            eps,
            adamw_mode,
            weight_decay,
            amsgrad,
        )
