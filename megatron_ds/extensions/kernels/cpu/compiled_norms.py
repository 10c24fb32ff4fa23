"""LayerNorm and RMSNorm of bf16 numbers with an optional residual addition, compiled from
csrc/elementwise/norms.cpp: an optional extension. With fp32 numbers torch's LayerNorm is as fast.
"""

import functools
import logging
from types import ModuleType
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ....host import load_compiled
from ....host.autograd_functions import Halves
from ....host.valueless_tensor import ValuelessTensor
from ....ops import norms
from ....ops.kernel_table import CPU

logger = logging.getLogger(__name__)

DTYPES = (torch.bfloat16,)


@functools.cache
def extension() -> ModuleType | Any:
    """Return the compiled norms; None, with one line in the log, where the package was installed without a
    compiler.
    """
    return load_compiled(
        "_norms", "norms", "torch's run instead, slower on CPU", logger
    )


def suits(x: torch.Tensor, weight: torch.Tensor, *_: object) -> bool:
    """Return whether the norms below take x: meta tensors have no memory. A single row is faster in torch's, and a
    weight of another length is torch's error."""
    return not x.is_meta and x.numel() > x.shape[-1] and weight.shape == x.shape[-1:]


def suits_both(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *_: object
) -> bool:
    """Return whether `residual_norm` takes both: torch adds a residual of a wider dtype or of another shape."""
    return suits(x, weight) and residual.dtype == x.dtype and residual.shape == x.shape


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [.., hidden] → x / sqrt(mean(x²) + eps) * weight. Keeps x and an fp32 number a row for backward."""
    return _CompiledNorm.apply(x, None, weight, None, eps)


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> torch.Tensor:
    """x [.., hidden] → (x - mean) / sqrt(var + eps) * weight + bias. Keeps x and two fp32 numbers a row."""
    return _CompiledNorm.apply(x, None, weight, bias, eps)


def residual_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm(x + residual), x + residual), both [.., hidden] as x: LayerNorm with a bias, RMSNorm without.

    Keeps the second result and the norm's numbers of each row for backward.
    """
    return _CompiledNorm.apply(x, residual, weight, bias, eps)


class _CompiledNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, weight, bias, eps):
        ctx.set_materialize_grads(False)
        y, total, means, inverses = norm_rows(x, residual, weight, bias, eps)
        ctx.save_for_backward(total, means, inverses, weight, bias)
        return y if residual is None else (y, total)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, past=None):
        *kept, weight, bias = ctx.saved_tensors
        adds = ctx.needs_input_grad[1]
        if dy is None:  # only the sum was used
            return past, past if adds else None, None, None, None
        dx, dw, db = norm_gradients(dy, past, *kept, (weight, bias))
        return dx, dx if adds else None, dw, db, None


def norm_rows(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """x [.., hidden] → the norm of the sum with the residual, and (sum, means, inverses), which the gradients
    need."""
    y = _like(x)
    total = _like(x) if residual is not None else None
    width = x.shape[-1]
    inverses = x.new_empty(x.numel() // width, dtype=torch.float32)
    means = None if bias is None else torch.empty_like(inverses)
    _call(
        "forward",
        x,
        residual,
        weight.float(),
        bias if bias is None else bias.float(),
        y,
        total,
        means,
        inverses,
        len(inverses),
        width,
        eps,
    )
    return y, x if total is None else total, means, inverses


def norm_gradients(
    dy: torch.Tensor,
    past: torch.Tensor | None,
    total: torch.Tensor,
    means: torch.Tensor | None,
    inverses: torch.Tensor,
    parameters: tuple[torch.Tensor, torch.Tensor | None],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Gradients of the sum, the weight and the bias. past: the gradient of the sum from elsewhere."""
    weight, bias = parameters
    # Each chunk of rows has its own sums for weight and bias; the first one holds the totals.
    rows = len(inverses)
    width = total.shape[-1]
    dx = _like(total)
    sums = inverses.new_empty((-(-rows // extension().CHUNK), 2, width))
    _call(
        "backward",
        dy,
        past,
        total,
        weight.float(),
        means,
        inverses,
        dx,
        sums,
        rows,
        width,
    )
    dw, db = sums[0].to(
        weight.dtype, copy=True
    )  # a copy: the sums of chunks are released
    return dx, dw, None if bias is None else db


def _like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _call(function: str, x: torch.Tensor, *arguments: Any) -> None:
    """Pass tensors by address; a plan's have none, and nothing is computed."""
    if isinstance(x, ValuelessTensor):
        return
    held = [
        a.detach().contiguous() if isinstance(a, torch.Tensor) else a
        for a in (x, *arguments)
    ]  # until the function returns
    numbers = [_number(a) for a in held]
    getattr(extension(), function)(*numbers, torch.get_num_threads())


def _number(argument: torch.Tensor | float | None) -> float:
    """Return the address of a tensor, 0 for None, a number itself."""
    if argument is None:
        return 0
    return argument.data_ptr() if isinstance(argument, torch.Tensor) else argument


_HALVES = Halves(norm_rows, norm_gradients)
for _norm in (layer_norm, rms_norm, residual_norm):
    _HALVES.of(_norm)
_LIMITS = {
    "devices": CPU,
    "dtypes": DTYPES,
    "available": lambda: "" if extension() else "not compiled",
}
norms.layer_norm.kernel("c++", suits=suits, **_LIMITS)(layer_norm)
norms.rms_norm.kernel("c++", suits=suits, **_LIMITS)(rms_norm)
norms.residual_norm.kernel("c++", suits=suits_both, **_LIMITS)(residual_norm)
