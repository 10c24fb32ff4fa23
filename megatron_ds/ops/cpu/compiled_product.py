"""Products of bf16 matrices compiled from csrc/product.cpp, for CPUs with AVX-512 BF16 and without AMX: an
optional extension.

In a training step it reaches 0.85 to 0.9 of the processor's peak, where oneDNN's products reach 0.65 to 0.8,
and it adds sums to fp32 matrices without rounding them to bf16.
"""

import functools
import logging
from types import ModuleType
from typing import Any

import torch
from torch._subclasses import FakeTensor

from ...host import load_compiled
from .widened_products import WORKSPACE, is_widened

logger = logging.getLogger(__name__)

LEAST = 64          # rows, columns and numbers of a sum: below it packing the factors is not worth its time


@functools.cache
def extension() -> ModuleType | Any:
    """The compiled products; None, with one line in the log, where the package was installed without a
    compiler."""
    return load_compiled("_product", "products of bf16 matrices",
                         "oneDNN's run instead, slower on a CPU with AVX-512 BF16", logger)


def reason_against() -> str:
    """Why this machine has no compiled products; "" if it has."""
    compiled = extension()
    if compiled is None:
        return "not compiled"
    if not compiled.has_products():
        return "no AVX-512 BF16"
    return "AMX is faster" if compiled.has_tiles() else ""


def suits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the functions below take bf16 matrices a [n, k] and b [k, m], and are faster."""
    is_large = min(*a.shape, b.shape[1]) >= LEAST
    is_narrow = a.dtype == b.dtype == torch.bfloat16
    return is_large and is_narrow and _has_lines(a) and _has_lines(b) and not is_widened(a)


def takes_target(out: torch.Tensor) -> bool:
    """Whether results can be written to out [n, m]."""
    return out.stride(1) == 1


def product_into(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor,
                 bias: torch.Tensor | None) -> torch.Tensor:
    """out = a b + bias, for out [n, m] and bias [m] or None in bf16; returns out. Not for autograd."""
    _run(extension().product, out, a, b, None if bias is None else bias.contiguous())
    return out


def add_product_(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """out += a b for out fp32 [n, m]; returns out. Not for autograd."""
    _run(extension().add_product, out, a, b)
    return out


def _run(function: Any, out: torch.Tensor, a: torch.Tensor, b: torch.Tensor,
         *bias: torch.Tensor | None) -> None:
    sizes = (a.shape[0], b.shape[1], a.shape[1])
    count = extension().bytes(sizes, out.dtype == torch.float32)
    packed = WORKSPACE.take("packed factors", -(-count // 4))
    if not isinstance(out, FakeTensor):                 # of a plan
        addresses = [0 if t is None else t.data_ptr() for t in bias]
        function(sizes, _place(a), _place(b), out.data_ptr(), out.stride(0), *addresses, packed.data_ptr(),
                 torch.get_num_threads())
    torch.autograd.graph.increment_version(out)


def _has_lines(t: torch.Tensor) -> bool:
    """Whether rows or columns are contiguous."""
    return t.stride(0) == 1 or t.stride(1) == 1


def _place(t: torch.Tensor) -> tuple[int, int, int]:
    """Address, and the strides of rows and columns."""
    return t.data_ptr(), t.stride(0), t.stride(1)
