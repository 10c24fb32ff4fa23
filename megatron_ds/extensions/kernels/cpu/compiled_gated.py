"""SwiGLU compiled from csrc/elementwise/gated.cpp: an optional extension. It reads and writes each number once, where
torch's operations pass over memory twice forward and four times backward.
"""

import functools
import logging
from types import ModuleType
from typing import Any

import torch

from ....host import load_compiled
from ....host.autograd_functions import differentiable_once, direct_apply
from ....host.valueless_tensor import ValuelessTensor
from ....ops import activation
from ....ops.kernel_table import CPU

logger = logging.getLogger(__name__)

DTYPES = (torch.float32, torch.bfloat16)


@functools.cache
def extension() -> ModuleType | Any:
    """Return the compiled SwiGLU; None, with one line in the log, where the package was installed without a
    compiler."""
    return load_compiled(
        "_gated", "SwiGLU", "torch's runs instead, slower on CPU", logger
    )


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """`ops.activation.swiglu` of x [.., 2 f] on the CPU, of one of `DTYPES`. Keeps x for backward."""
    return _swiglu(x)


class _CompiledSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous()
        ctx.save_for_backward(x)
        y = x.new_empty((*x.shape[:-1], x.shape[-1] // 2))
        _call("forward", x, y)
        return y

    @staticmethod
    @differentiable_once
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        dx = torch.empty_like(x)
        _call("backward", x, dy.contiguous(), dx)
        return dx


_swiglu = direct_apply(_CompiledSwiGLU)


def _call(function: str, x: torch.Tensor, *others: torch.Tensor) -> None:
    """Pass tensors by address; a plan's have none, and nothing is computed."""
    if isinstance(x, ValuelessTensor) or not x.numel():
        return
    width = x.shape[-1] // 2
    getattr(extension(), function)(
        x.data_ptr(),
        *(t.data_ptr() for t in others),
        x.numel() // (2 * width),
        width,
        x.dtype == torch.bfloat16,
        torch.get_num_threads(),
    )


activation.swiglu.kernel(
    "c++",
    devices=CPU,
    dtypes=DTYPES,
    available=lambda: "" if extension() else "not compiled",
)(swiglu)
