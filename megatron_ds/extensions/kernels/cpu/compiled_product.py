"""Products of fp32 and bf16 matrices compiled from csrc/products/product.cpp, for CPUs with AVX-512 BF16: an optional
extension.

In a training step products of bf16 matrices reach 0.85 to 0.9 of the processor's peak, where oneDNN's reach
0.65 to 0.8, and they are added to fp32 matrices without rounding to bf16 first. Those of fp32 matrices reach
0.87 to 0.9, where MKL's reach 0.8 to 0.84 on an AMD processor; on those of Intel MKL's are used. A single
bf16 row takes a third to two thirds of the time of torch's kernels.
"""

import functools
import logging
from functools import partial
from types import ModuleType
from typing import Any

import torch

from ....host import load_compiled
from ....host.valueless_tensor import ValuelessTensor
from ....ops import product
from ....ops.kernel_table import CPU
from ....ops.meta_tensors import has_memory
from ....ops.widened_products import WORKSPACE, is_widened

logger = logging.getLogger(__name__)

NAMES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
}  # of the functions of the extension
# Below these sizes packing the factors is not worth its time: rows, columns and numbers of a sum; and their
# product. benchmarks/product_sizes.py measures them.
LEAST = {torch.float32: 128, torch.bfloat16: 64}
LEAST_MULTIPLICATIONS = {torch.float32: 2**22, torch.bfloat16: 64**3}


@functools.cache
def extension() -> ModuleType | Any:
    """Return the compiled products; None, with one line in the log, where the package was installed without a
    compiler."""
    return load_compiled(
        "_product",
        "products of matrices",
        "torch's libraries run instead, slower on a CPU with AVX-512 BF16",
        logger,
    )


def reason_against_rows() -> str:
    """Return why this machine has no compiled product of a single bf16 row; "" if it has."""
    compiled = extension()
    if compiled is None:
        return "not compiled"
    return "" if compiled.has_products() else "no AVX-512 BF16"


def reason_against(*dtypes: torch.dtype) -> str:
    """Return why this machine has no compiled products of any of these dtypes; "" if it has."""
    if reason := reason_against_rows():
        return reason
    reasons = [_reason_for_another(extension(), dtype) for dtype in dtypes]
    return "" if "" in reasons else "; ".join(reasons)


def _reason_for_another(compiled: Any, dtype: torch.dtype) -> str:
    if dtype == torch.bfloat16:
        return "AMX is faster" if compiled.has_tiles() else ""
    if not torch.backends.mkl.is_available():
        return "torch multiplies without MKL"
    return "" if compiled.is_amd() else "MKL is made for this processor"


def suits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether the functions below take matrices a [n, k] and b [k, m] on this machine, and are faster."""
    (n, k), m = a.shape, b.shape[1]
    if b.dtype != a.dtype or not is_compiled(a.dtype) or is_widened(a):
        return False
    return pays(a.dtype, n, k, m) and _has_lines(a) and _has_lines(b)


def pays(dtype: torch.dtype, n: int, k: int, m: int) -> bool:
    """Return whether a compiled product [n, k] [k, m] is faster than torch's library where this machine has both.

    It depends on dtype and sizes alone: a run that is resumed, and each rank, computes the same bits.
    """
    return min(n, k, m) >= LEAST[dtype] and n * k * m >= LEAST_MULTIPLICATIONS[dtype]


@functools.cache
def is_compiled(dtype: torch.dtype) -> bool:
    """Return whether this machine has compiled products of a dtype, and no faster ones."""
    return dtype in NAMES and not reason_against(dtype)


def takes_target(out: torch.Tensor) -> bool:
    """Return whether results can be written to out [n, m]."""
    return out.stride(1) == 1


def product_into(
    out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """out = a b + bias, for out [n, m] and bias [m] or None in the dtype of a; returns out. Not for
    autograd."""
    _run("product", out, a, b, None if bias is None else bias.contiguous())
    return out


def add_product_(
    out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, overwrites: bool = False
) -> torch.Tensor:
    """out += a b for out fp32 [n, m], or out = a b; returns out. Not for autograd."""
    _run("write_product" if overwrites else "add_product", out, a, b)
    return out


def suits_row(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Return whether `row_product` takes x [1, in], weight [out, in] and bias [out] or None, all bf16."""
    has_rows = (
        x.shape[0] == 1
        and x.stride(1) == weight.stride(1) == 1
        and min(weight.shape) > 0
    )
    return (
        has_rows and x.dtype == weight.dtype and (bias is None or bias.dtype == x.dtype)
    )


def row_product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> torch.Tensor:
    """out = x Wᵀ + bias for x [1, in], weight [out, in] and out [1, out]; returns out. Not for autograd."""
    bias = None if bias is None else bias.contiguous()
    if not isinstance(out, ValuelessTensor):  # of a plan
        addresses = x.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr()
        extension().row_product(
            weight.shape,
            (weight.data_ptr(), weight.stride(0)),
            *addresses,
            torch.get_num_threads(),
        )
    torch.autograd.graph.increment_version(out)
    return out


def _run(
    function: str,
    out: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    *bias: torch.Tensor | None,
) -> None:
    sizes = (a.shape[0], b.shape[1], a.shape[1])
    name = NAMES[a.dtype]
    count = getattr(extension(), f"bytes_{name}")(sizes, out.dtype == torch.float32)
    packed = WORKSPACE.take("packed factors", -(-count // 4))
    if not isinstance(out, ValuelessTensor):  # of a plan
        addresses = [0 if t is None else t.data_ptr() for t in bias]
        getattr(extension(), f"{function}_{name}")(
            sizes,
            _place(a),
            _place(b),
            out.data_ptr(),
            out.stride(0),
            *addresses,
            packed.data_ptr(),
            torch.get_num_threads(),
        )
    torch.autograd.graph.increment_version(out)


def _has_lines(t: torch.Tensor) -> bool:
    """Return whether rows or columns are contiguous."""
    return t.stride(0) == 1 or t.stride(1) == 1


def _place(t: torch.Tensor) -> tuple[int, int, int]:
    """Address, and the strides of rows and columns."""
    return t.data_ptr(), t.stride(0), t.stride(1)


def _suits_row(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor | None = None,
) -> bool:
    is_written = out is None or out.dtype == x.dtype and takes_target(out)
    return (
        is_written
        and has_memory(x)
        and not is_widened(x)
        and suits_row(x, weight, bias)
    )


@product.affine.kernel(
    "one row",
    devices=CPU,
    dtypes=(torch.bfloat16,),
    suits=_suits_row,
    available=reason_against_rows,
)
def _affine_of_one_row(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Generation of text: each token multiplies one row by all weights."""
    out = x.new_empty(1, weight.shape[0]) if out is None else out
    return row_product(x, weight, bias, out)


def _compiled_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return product_into(a.new_empty(a.shape[0], b.shape[1]), a, b, None)


def _suits_affine(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor | None = None,
) -> bool:
    is_written = out is None or out.dtype == x.dtype and takes_target(out)
    return (
        is_written and (bias is None or bias.dtype == x.dtype) and suits(x, weight.t())
    )


def _compiled_affine(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    out = x.new_empty(x.shape[0], weight.shape[0]) if out is None else out
    return product_into(out, x, weight.t(), bias)


for _dtype in NAMES:
    _limits = {
        "devices": CPU,
        "dtypes": (_dtype,),
        "available": partial(reason_against, _dtype),
    }
    product.product.kernel("c++", suits=suits, **_limits)(_compiled_product)
    product.affine.kernel("c++", suits=_suits_affine, **_limits)(_compiled_affine)


def _takes_sum(
    out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, overwrites: bool = False
) -> bool:
    return takes_target(out) and suits(a, b)


@product.add_product_.kernel(
    "c++",
    devices=CPU,
    dtypes=(torch.float32,),
    suits=_takes_sum,
    available=partial(reason_against, *NAMES),
)
def _compiled_sum(
    out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, overwrites: bool = False
) -> None:
    add_product_(out, a, b, overwrites)
