"""GELU with the tanh approximation, compiled from csrc/elementwise/gelu.cpp: an optional extension, three times as fast
as torch's on a CPU.
"""

import functools
import logging
from types import ModuleType
from typing import Any

import torch

from ....host import load_compiled
from ....host.autograd_functions import Halves
from ....ops.activation import gelu
from ....ops.kernel_table import CPU
from ....ops.meta_tensors import has_memory

logger = logging.getLogger(__name__)

DTYPES = (torch.float32, torch.bfloat16)


@functools.cache
def extension() -> ModuleType | Any:
    """Return the compiled GELU; None, with one line in the log, where the package was installed without a
    compiler.
    """
    return load_compiled(
        "_gelu", "GELU", "torch's runs instead, three times slower on CPU", logger
    )


def compiled_gelu(x: torch.Tensor) -> torch.Tensor:
    """`ops.activation.gelu` of x with memory on the CPU, of one of `DTYPES`."""
    return _CompiledGELU.apply(x)


class _CompiledGELU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous()
        ctx.save_for_backward(x)
        return _forward(x)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return _backward(dy, x)


def _forward(x: torch.Tensor) -> torch.Tensor:
    """x contiguous."""
    y = torch.empty_like(x)
    extension().forward(
        x.data_ptr(),
        y.data_ptr(),
        x.numel(),
        x.dtype == torch.bfloat16,
        torch.get_num_threads(),
    )
    return y


def _backward(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    dy = dy.contiguous()
    dx = torch.empty_like(x)
    extension().backward(
        x.data_ptr(),
        dy.data_ptr(),
        dx.data_ptr(),
        x.numel(),
        x.dtype == torch.bfloat16,
        torch.get_num_threads(),
    )
    return dx


Halves(_forward, _backward).of(compiled_gelu)
gelu.kernel(
    "c++",
    devices=CPU,
    dtypes=DTYPES,
    suits=has_memory,
    available=lambda: "" if extension() else "not compiled",
)(compiled_gelu)
