"""One AdamW update of flat fp32 tensors, the reference in torch's operations; and torch's Adam with the names
and arguments of DeepSpeed's.

Implementations: cpu/compiled_adam.py. GPUs use torch's fused AdamW (`optim/optimizers.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..errors import ConfigError


@dataclass(frozen=True)
class AdamRow:
    """The tensors of one update: contiguous, on the CPU, of the same length, fp32 but for `low`.

    p     weight, updated in place as m and v, the moments, are; grad is only read
    step  number of this update, from 1
    low   bf16 or fp16: receives p, rounded to nearest even
    """

    p: torch.Tensor
    grad: torch.Tensor
    m: torch.Tensor
    v: torch.Tensor
    step: int
    low: torch.Tensor | None = None


@torch.no_grad()
def reference_adamw_(rows: Sequence[AdamRow], *, lr: float, betas: tuple[float, float], eps: float,
                     weight_decay: float, grad_scale: float = 1.0) -> None:
    """Update each row with gradient * grad_scale. Loshchilov and Hutter 2019 (arXiv:1711.05101), alg. 2."""
    for r in rows:
        beta1, beta2 = betas
        g = r.grad * _fp32(grad_scale)
        r.m.add_((g - r.m) * _fp32(1 - beta1))
        r.v.mul_(_fp32(beta2)).add_(g * g * _fp32(1 - beta2))
        # In double: torch's root of a long fp32 tensor may be MKL's, which is not rounded to nearest.
        root = r.v.double().sqrt().float()
        denominator = root * _fp32((1 - beta2**r.step) ** -0.5) + _fp32(eps)
        r.p.mul_(_fp32(1 - lr * weight_decay)).sub_(r.m / denominator * _fp32(lr / (1 - beta1**r.step)))
        if r.low is not None:
            r.low.copy_(r.p)


def _fp32(x: float) -> float:
    """Rounded to fp32: torch would use a Python number in double for some operations."""
    return float(np.float32(x))


class FusedAdam(torch.optim.Adam):
    """torch's Adam with the name and arguments of DeepSpeed's FusedAdam; an engine runs it on its shards.

    adam_w_mode: weight decay is decoupled (AdamW). set_grad_none has no effect. Raises ConfigError for
    bias_correction=False.
    """

    def __init__(self, params: Any, lr: float = 1e-3, bias_correction: bool = True,
                 betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, adam_w_mode: bool = True,
                 weight_decay: float = 0.0, amsgrad: bool = False, set_grad_none: bool = True):
        if not bias_correction:
            raise ConfigError(f"{type(self).__name__}(bias_correction=False) is not supported: torch's Adam "
                              "corrects its moments. Leave the argument out, or lower the learning rate of "
                              "the first steps.")
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, decoupled_weight_decay=adam_w_mode)


class DeepSpeedCPUAdam(FusedAdam):
    """`FusedAdam` with DeepSpeed's CPU Adam's arguments. "offload_optimizer" places its state."""

    def __init__(self, model_params: Any, lr: float = 1e-3, bias_correction: bool = True,
                 betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0,
                 amsgrad: bool = False, adamw_mode: bool = True, fp32_optimizer_states: bool = True):
        if not fp32_optimizer_states:
            raise ConfigError("DeepSpeedCPUAdam(fp32_optimizer_states=False) is not supported: states are "
                              "fp32. Leave the argument out.")
        super().__init__(model_params, lr, bias_correction, betas, eps, adamw_mode, weight_decay, amsgrad)
