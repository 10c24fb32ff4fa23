"""One AdamW update of flat fp32 tensors on the CPU: a reference in torch, and a kernel in one pass over
memory.

Implementations: `adamw_` is csrc/cpu_adam.cpp, an optional extension for the CPU: unscaling and clipping
(`grad_scale`), both moments, weight decay, bias correction and rounding of the weight to the model's 16
bits, with each element read and written once. `reference_adamw_` does the same operations in the same order,
each rounded separately, so the results are equal to the last bit on every processor and for every cut of the
tensors. GPUs use torch's fused AdamW (`optim/optimizers.py`).
"""

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch

from ..errors import ConfigError
from ..host import load_compiled

logger = logging.getLogger(__name__)

LOW_KINDS = {torch.bfloat16: 1, torch.float16: 2}


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


def adamw_(rows: Sequence[AdamRow], *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float,
           grad_scale: float = 1.0, threads: int | None = None, variant: str = "") -> None:
    """`reference_adamw_` in one pass, on `threads` (default: torch's number).

    variant: one of `variants()`, default the fastest. Needs `extension()`; raises ValueError for tensors it
    cannot take.
    """
    table = np.array([_checked(r) for r in rows], dtype=np.int64).reshape(-1, 8)
    extension().adamw(table, lr=lr, beta1=betas[0], beta2=betas[1], eps=eps, weight_decay=weight_decay,
                      grad_scale=grad_scale, threads=threads or torch.get_num_threads(), variant=variant)


def variants() -> list[str]:
    """Instruction sets of the kernel on this processor, fastest first; none without the extension."""
    return extension().variants() if extension() else []


@functools.cache
def extension() -> ModuleType | Any:
    """The compiled module; None, with a line in the log, where no compiler was found at installation."""
    return load_compiled("_cpu_adam", "CPU Adam", "torch's AdamW runs instead, slower where gradients are "
                         "unscaled or weights have 16 bits", logger)


def _fp32(x: float) -> float:
    """Rounded to fp32: torch would use a Python number in double for some operations."""
    return float(np.float32(x))


def _checked(r: AdamRow) -> tuple[int, ...]:
    tensors = [r.p, r.grad, r.m, r.v]
    low = [] if r.low is None else [r.low]
    for t in tensors + low:
        if t.device.type != "cpu" or t.numel() != r.p.numel() or not t.is_contiguous():
            how = "" if t.is_contiguous() else "not "
            raise ValueError(f"CPU Adam got {t.numel()} elements on {t.device}, {how}contiguous, beside a "
                             f"parameter of {r.p.numel()}: all must be on the CPU, contiguous, and equally "
                             "long.")
    wrong = [t.dtype for t in tensors if t.dtype != torch.float32]
    wrong += [t.dtype for t in low if t.dtype not in LOW_KINDS]
    if wrong:
        raise ValueError(f"CPU Adam got {wrong[0]}: parameter, gradient and moments must be fp32, low bf16 "
                         "or fp16.")
    if r.step < 1:
        raise ValueError(f"CPU Adam got step {r.step}: updates count from 1, bias corrections divide by zero "
                         "at 0.")
    if r.p.numel() == 0:
        return 8, 8, 8, 8, 0, 0, 0, r.step       # any address: nothing is read
    low_row = (low[0].data_ptr(), LOW_KINDS[low[0].dtype]) if low else (0, 0)
    return (*(t.data_ptr() for t in tensors), *low_row, r.p.numel(), r.step)


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
