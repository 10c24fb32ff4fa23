"""Matrix products in the dtype of their factors.

Implementations: torch's `mm` and `addmm`; on CPUs without instructions for 16-bit products, those of
cpu/widened_products.py; on CPUs with AVX-512 BF16, compiled products (cpu/compiled_product.py) of a single
bf16 row, of bf16 matrices unless there is AMX, and on AMD's of fp32 matrices; and sums of other 16-bit
products in fp32 by cpu/compiled_addition.py. On GPUs 16-bit products are added to fp32 sums by gpu/fp32_sums.py.
"""

from functools import partial

import torch
import torch.nn.functional as F

from .cpu import compiled_addition, compiled_product
from .cpu.widened_products import add_widened_product_, is_widened, widened_product
from .gpu import fp32_sums
from .kernel_table import CPU, GPU, Operation, random_tensors
from .meta_tensors import has_memory


@Operation
def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a b for matrices [n, k] and [k, m]."""
    return a.mm(b)


@Operation
def affine(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x Wᵀ + b for x [n, in], weight [out, in], bias [out] or None; in `out` if it is given."""
    return _linear(x, weight, bias, out=out)


@product.example
def _product_example(
    rows: int, width: int, dtype: torch.dtype, device: torch.device
) -> tuple:
    return tuple(
        t.detach()
        for t in random_tensors(dtype, device, (rows, width), (width, rows + 1))
    )


@affine.example
def _affine_example(
    rows: int, width: int, dtype: torch.dtype, device: torch.device
) -> tuple:
    return tuple(
        t.detach()
        for t in random_tensors(
            dtype, device, (rows, width), (rows + 1, width), (rows + 1,)
        )
    )


FP32_SUMS = "fp32 sums"
_linear = F.linear  # takes `out`, too
LOW = (torch.bfloat16, torch.float16)
MOST_NARROW = (
    1 << 22
)  # elements of a product at a time that a CPU adds to a wider tensor


def _suits_row(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor | None = None,
) -> bool:
    is_written = (
        out is None or out.dtype == x.dtype and compiled_product.takes_target(out)
    )
    return (
        is_written
        and has_memory(x)
        and not is_widened(x)
        and compiled_product.suits_row(x, weight, bias)
    )


@affine.implementation(
    "one row",
    devices=CPU,
    dtypes=(torch.bfloat16,),
    suits=_suits_row,
    available=compiled_product.reason_against_rows,
)
def _affine_of_one_row(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Generation of text: each token multiplies one row by all weights."""
    out = x.new_empty(1, weight.shape[0]) if out is None else out
    return compiled_product.row_product(x, weight, bias, out)


def _compiled_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return compiled_product.product_into(
        a.new_empty(a.shape[0], b.shape[1]), a, b, None
    )


def _suits_affine(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor | None = None,
) -> bool:
    is_written = (
        out is None or out.dtype == x.dtype and compiled_product.takes_target(out)
    )
    return (
        is_written
        and (bias is None or bias.dtype == x.dtype)
        and compiled_product.suits(x, weight.t())
    )


def _compiled_affine(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    out = x.new_empty(x.shape[0], weight.shape[0]) if out is None else out
    return compiled_product.product_into(out, x, weight.t(), bias)


for _dtype in compiled_product.NAMES:
    _limits = {
        "devices": CPU,
        "dtypes": (_dtype,),
        "available": partial(compiled_product.reason_against, _dtype),
    }
    product.implementation("c++", suits=compiled_product.suits, **_limits)(
        _compiled_product
    )
    affine.implementation("c++", suits=_suits_affine, **_limits)(_compiled_affine)


@product.implementation(
    "fp32", devices=CPU, dtypes=LOW, suits=lambda a, b: is_widened(a)
)
def _widened_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return widened_product(a, b, None)


@affine.implementation(
    "fp32", devices=CPU, dtypes=LOW, suits=lambda x, *_: is_widened(x)
)
def _widened_affine(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    return widened_product(x, weight.t(), bias, out)


def product_into(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """out = a b, of the dtype of the factors. Without autograd."""
    affine(a, b.t(), None, out)


@Operation
def add_product_(
    out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, overwrites: bool = False
) -> None:
    """out += a b, in place and without autograd. `out` may be wider than the factors.

    overwrites: out = a b instead, whatever `out` contains
    """
    if out.dtype == torch.float32 and is_widened(a):
        add_widened_product_(out.zero_() if overwrites else out, a, b)
    elif out.dtype != a.dtype or is_widened(a):
        if out.device.type == "cpu" and out.numel() > MOST_NARROW:
            rows = max(1, MOST_NARROW // out.shape[1])
            for part, of_a in zip(out.split(rows), a.split(rows)):
                add_narrow_(part, product(of_a, b), overwrites)
        else:
            add_narrow_(out, product(a, b), overwrites)
    elif overwrites:
        torch.mm(a, b, out=out)
    else:
        out.addmm_(a, b)


add_product_.implementation(
    FP32_SUMS,
    devices=GPU,
    dtypes=(torch.float32,),
    suits=fp32_sums.suits,
    available=fp32_sums.reason_against,
)(fp32_sums.add_product_)


@add_product_.implementation("whole", devices=GPU)
def _sum_on_gpu(
    out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, overwrites: bool = False
) -> None:
    """A GPU multiplies all dtypes, and a product is as small as the weight."""
    if out.dtype != a.dtype:
        rounded = torch.mm(a, b)
        out.copy_(rounded) if overwrites else out.add_(rounded)
    elif overwrites:
        torch.mm(a, b, out=out)
    else:
        out.addmm_(a, b)


def _takes_sum(
    out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, overwrites: bool = False
) -> bool:
    return compiled_product.takes_target(out) and compiled_product.suits(a, b)


@add_product_.implementation(
    "c++",
    devices=CPU,
    dtypes=(torch.float32,),
    suits=_takes_sum,
    available=partial(compiled_product.reason_against, *compiled_product.NAMES),
)
def _compiled_sum(
    out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, overwrites: bool = False
) -> None:
    compiled_product.add_product_(out, a, b, overwrites)


@add_product_.example
def _add_product_example(
    rows: int, width: int, dtype: torch.dtype, device: torch.device
) -> tuple:
    out, a, b = (
        t.detach()
        for t in random_tensors(
            dtype, device, (rows, rows + 1), (width, rows), (width, rows + 1)
        )
    )
    return (
        out.to(torch.promote_types(dtype, torch.float32)),
        a.bfloat16().t(),
        b.bfloat16(),
    )


@add_product_.example
def _add_wide_product_example(
    rows: int, width: int, dtype: torch.dtype, device: torch.device
) -> tuple:
    wide = torch.promote_types(dtype, torch.float32)
    out, a, b = (
        t.detach()
        for t in random_tensors(
            wide, device, (rows, rows + 1), (width, rows), (width, rows + 1)
        )
    )
    return out, a.t(), b


@Operation
def add_narrow_(
    out: torch.Tensor, x: torch.Tensor, overwrites: bool = False
) -> torch.Tensor:
    """out += x, in place and without autograd; out = x with `overwrites`. `out` may be wider than x."""
    return out.copy_(x) if overwrites else out.add_(x)


@add_narrow_.example
def _add_narrow_example(
    rows: int, width: int, dtype: torch.dtype, device: torch.device
) -> tuple:
    out, x = (
        t.detach() for t in random_tensors(dtype, device, (rows, width), (rows, width))
    )
    return out, x.bfloat16()


def _suits_compiled_addition(
    out: torch.Tensor, x: torch.Tensor, overwrites: bool = False
) -> bool:
    return not overwrites and has_memory(out) and compiled_addition.suits(out, x)


@add_narrow_.implementation(
    "c++",
    devices=CPU,
    dtypes=(torch.float32,),
    suits=_suits_compiled_addition,
    available=lambda: "" if compiled_addition.extension() else "not compiled",
)
def _compiled_addition(
    out: torch.Tensor, x: torch.Tensor, overwrites: bool = False
) -> torch.Tensor:
    return compiled_addition.compiled_add_(out, x)
