"""AdamW, Lion and Adagrad on the CPU in one pass over memory: csrc/optimizers/cpu_adam.cpp, an optional extension.

It unscales and clips (`grad_scale`), updates both moments and the weight, and rounds the weight to the
model's 16 bits, with each element read and written once. It does the operations of `reference_adamw_` in the
same order, each rounded separately, so the results are equal to the last bit on every processor and for every
cut of the tensors.
"""

import functools
import logging
from collections.abc import Sequence
from itertools import chain
from types import ModuleType
from typing import Any

import numpy as np
import torch

from ....host import load_compiled
from ....ops import adam
from ....ops.kernel_table import CPU
from ....ops.update_rows import AdamRow, AdamStep, UpdateRow
from ...optimizers import elementwise_updates

logger = logging.getLogger(__name__)

LOW_KINDS = {torch.bfloat16: 1, torch.float16: 2}


def adamw_(
    rows: Sequence[AdamRow],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    grad_scale: float = 1.0,
    threads: int | None = None,
    variant: str = "",
) -> None:
    """`reference_adamw_` in one pass, on `threads` (default: torch's number).

    variant: one of `variants()`, default the fastest. Needs `extension()`; raises ValueError for tensors it
    cannot take.
    """
    _run(
        "adamw",
        [_checked([r.p, r.grad, r.m, r.v], r.low, r.step) for r in rows],
        threads,
        variant,
        lr=lr,
        beta1=betas[0],
        beta2=betas[1],
        eps=eps,
        weight_decay=weight_decay,
        grad_scale=grad_scale,
    )


def with_one_state_(
    rule: str,
    rows: Sequence[UpdateRow],
    *,
    threads: int | None = None,
    variant: str = "",
    **numbers: float,
) -> None:
    """`elementwise_updates.lion` or `.adagrad`, by the name `rule`, in one pass; as `adamw_`."""
    _run(rule, _with_one_state(rows), threads, variant, **numbers)


def _with_one_state(rows: Sequence[UpdateRow]) -> list[tuple[int, ...]]:
    return [_checked([r.p, r.grad, r.state, r.state], r.low, 1) for r in rows]


def _run(
    rule: str,
    rows: Sequence[tuple[int, ...]],
    threads: int | None,
    variant: str,
    **numbers: float,
) -> None:
    table = np.array(rows, dtype=np.int64).reshape(-1, 8)
    getattr(extension(), rule)(
        table, threads=threads or torch.get_num_threads(), variant=variant, **numbers
    )


def variants() -> list[str]:
    """Instruction sets of the kernel on this processor, fastest first; none without the extension."""
    return extension().variants() if extension() else []


@functools.cache
def extension() -> ModuleType | Any:
    """Return the compiled module; None, with a line in the log, where no compiler was found at installation."""
    return load_compiled(
        "_cpu_adam",
        "CPU Adam",
        "torch's operations run instead, slower where gradients "
        "are unscaled or weights have 16 bits",
        logger,
    )


def _checked(
    tensors: Sequence[torch.Tensor], low: torch.Tensor | None, step: int
) -> tuple[int, ...]:
    """Return a row of the table. tensors: parameter, gradient and two of state."""
    # The kernel reads addresses, so devices, lengths and dtypes are checked here.
    p = tensors[0]
    lows = [] if low is None else [low]
    for t in (*tensors, *lows):
        if t.device.type != "cpu" or t.numel() != p.numel() or not t.is_contiguous():
            how = "" if t.is_contiguous() else "not "
            raise ValueError(
                f"CPU Adam got {t.numel()} elements on {t.device}, {how}contiguous, beside a "
                f"parameter of {p.numel()}: all must be on the CPU, contiguous, and equally "
                "long."
            )
    wrong = [t.dtype for t in tensors if t.dtype != torch.float32]
    wrong += [t.dtype for t in lows if t.dtype not in LOW_KINDS]
    if wrong:
        raise ValueError(
            f"CPU Adam got {wrong[0]}: parameter, gradient and moments must be fp32, low bf16 "
            "or fp16."
        )
    if step < 1:
        raise ValueError(
            f"CPU Adam got step {step}: updates count from 1, bias corrections divide by zero "
            "at 0."
        )
    if p.numel() == 0:
        return 8, 8, 8, 8, 0, 0, 0, step  # any address: nothing is read
    # Addresses, the dtype of the low copy, the length, the step.
    low_row = (0, 0) if low is None else (low.data_ptr(), LOW_KINDS[low.dtype])
    return (*(t.data_ptr() for t in tensors), *low_row, p.numel(), step)


@adam.adamw.kernel(
    "c++",
    devices=CPU,
    available=lambda: "" if extension() else "not compiled",
)
def _adamw(grad: torch.Tensor, rows: Sequence[AdamRow], how: AdamStep) -> None:
    if how.skip is not None and how.skip:
        return
    wide = [r for r in rows if r.grad.dtype == torch.float32]
    others = (
        [r._replace(grad=r.grad.float())] for r in rows if r.grad.dtype != torch.float32
    )
    for part in chain([wide], others):
        adamw_(
            part,
            lr=how.lr,
            betas=how.betas,
            eps=how.eps,
            weight_decay=how.weight_decay,
            grad_scale=how.grad_scale,
        )
        part.clear()  # its copy is freed before the next is made


@elementwise_updates.lion.kernel(
    "c++",
    devices=CPU,
    available=lambda: "" if extension() else "not compiled",
)
def _lion(
    grad: torch.Tensor, rows: Sequence[UpdateRow], how: elementwise_updates.LionStep
) -> None:
    _update(
        "lion",
        rows,
        how.divisor,
        lr=how.lr,
        beta1=how.betas[0],
        beta2=how.betas[1],
        weight_decay=how.weight_decay,
    )


@elementwise_updates.adagrad.kernel(
    "c++",
    devices=CPU,
    available=lambda: "" if extension() else "not compiled",
)
def _adagrad(
    grad: torch.Tensor, rows: Sequence[UpdateRow], how: elementwise_updates.AdagradStep
) -> None:
    _update(
        "adagrad",
        rows,
        how.divisor,
        lr=how.lr,
        eps=how.eps,
        weight_decay=how.weight_decay,
    )


def _update(
    rule: str, rows: Sequence[UpdateRow], divisor: float, **numbers: float
) -> None:
    wide = [r for r in rows if r.grad.dtype == torch.float32]
    others = (
        [r._replace(grad=r.grad.float())] for r in rows if r.grad.dtype != torch.float32
    )
    scale = elementwise_updates.inverse(divisor)
    for part in chain([wide], others):
        _run(rule, _with_one_state(part), None, "", grad_scale=scale, **numbers)
        part.clear()  # its copy is freed before the next is made
