"""Adds a bf16 tensor to an fp32 one in place, compiled from csrc/products/accumulate.cpp: an optional extension.

torch's addition widens the bf16 tensor into a new one first, which doubles the bytes that are moved.
"""

import functools
import logging
from types import ModuleType
from typing import Any

import torch

from ....host import load_compiled
from ....ops import product
from ....ops.kernel_table import CPU
from ....ops.meta_tensors import has_memory

logger = logging.getLogger(__name__)


@functools.cache
def extension() -> ModuleType | Any:
    """Return the compiled addition; None, with one line in the log, where the package was installed without a
    compiler."""
    return load_compiled(
        "_accumulate",
        "addition of bf16 gradients",
        "torch's runs instead, half as fast on CPU",
        logger,
    )


def suits(out: torch.Tensor, x: torch.Tensor) -> bool:
    """Return whether `compiled_add_` takes these tensors, which have memory."""
    is_alike = out.shape == x.shape and out.is_contiguous() and x.is_contiguous()
    return x.dtype == torch.bfloat16 and x.device == out.device and is_alike


def compiled_add_(out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """out += x for contiguous tensors of one shape on the CPU, fp32 and bf16. Not for autograd."""
    extension().add(x.data_ptr(), out.data_ptr(), out.numel(), torch.get_num_threads())
    torch.autograd.graph.increment_version(out)
    return out


def _suits_compiled_addition(
    out: torch.Tensor, x: torch.Tensor, overwrites: bool = False
) -> bool:
    return not overwrites and has_memory(out) and suits(out, x)


@product.add_narrow_.kernel(
    "c++",
    devices=CPU,
    dtypes=(torch.float32,),
    suits=_suits_compiled_addition,
    available=lambda: "" if extension() else "not compiled",
)
def _compiled_addition(
    out: torch.Tensor, x: torch.Tensor, overwrites: bool = False
) -> torch.Tensor:
    return compiled_add_(out, x)
