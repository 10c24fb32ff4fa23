"""AdamW on the CPU in one pass over memory: csrc/cpu_adam.cpp, an optional extension.

It unscales and clips (`grad_scale`), updates both moments and the weight, and rounds the weight to the
model's 16 bits, with each element read and written once. It does the operations of `reference_adamw_` in the
same order, each rounded separately, so the results are equal to the last bit on every processor and for every
cut of the tensors.
"""

import functools
import logging
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...host import load_compiled

if TYPE_CHECKING:
    from ..adam import AdamRow

logger = logging.getLogger(__name__)

LOW_KINDS = {torch.bfloat16: 1, torch.float16: 2}


def adamw_(rows: Sequence["AdamRow"], *, lr: float, betas: tuple[float, float], eps: float,
           weight_decay: float, grad_scale: float = 1.0, threads: int | None = None,
           variant: str = "") -> None:
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


def _checked(r: "AdamRow") -> tuple[int, ...]:
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
