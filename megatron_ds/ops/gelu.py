"""GELU in its tanh form: torch's, and on CPU one pass of csrc/gelu.cpp, an optional extension, at a third of the time."""

import functools
import logging
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F

from ..compiled import load_compiled
from .workspace import has_memory

logger = logging.getLogger(__name__)

DTYPES = (torch.float32, torch.bfloat16)


def gelu(x: torch.Tensor) -> torch.Tensor:
    """0.5 x (1 + tanh(sqrt(2/π) (x + 0.044715 x³))). Hendrycks & Gimpel 2016 (arXiv:1606.08415), section 2."""
    if x.device.type == "cpu" and x.dtype in DTYPES and has_memory(x) and extension():
        return _FastGELU.apply(x)
    return reference_gelu(x)


def reference_gelu(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


@functools.cache
def extension() -> ModuleType | Any:
    """The compiled module; None, said once, where the package was installed without a compiler."""
    return load_compiled("_gelu", "GELU", "torch's runs instead, three "
                         "times slower on CPU", logger)


class _FastGELU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous()
        ctx.save_for_backward(x)
        y = torch.empty_like(x)
        extension().forward(x.data_ptr(), y.data_ptr(), x.numel(), x.dtype == torch.bfloat16, torch.get_num_threads())
        return y

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        dy, dx = dy.contiguous(), torch.empty_like(x)
        extension().backward(x.data_ptr(), dy.data_ptr(), dx.data_ptr(), x.numel(), x.dtype == torch.bfloat16,
                             torch.get_num_threads())
        return dx
