"""Matrix products in the dtype of their factors.

Implementations: torch's `mm` and `addmm`; on CPUs without instructions for 16-bit products, those of
widened_products.py. Kernels (extensions/kernels): on CPUs with AVX-512 BF16, compiled products of a single bf16
row, of bf16 matrices unless there is AMX, and on AMD's of fp32 matrices; and sums of other 16-bit products in fp32.
On GPUs 16-bit products are added to fp32 sums.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F

from .kernel_table import CPU, GPU, Operation, is_selected, random_tensors
from .widened_products import add_widened_product_, is_widened, widened_product
from .work import CallWork, product_work


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
    return _linear(x, weight, bias, out=out)  # type: ignore[call-arg]  # absent in torch's stubs


product.states_work()(product_work)


@affine.states_work()
def _affine_work(x: torch.Tensor, weight: torch.Tensor, *_: object) -> CallWork:
    return product_work(x, weight.t())


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


@add_product_.states_work()
def _added_work(
    out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, overwrites: bool = False
) -> CallWork:
    alone = product_work(a, b)
    read_too = out.numel() * out.element_size() * (not overwrites)
    return replace(alone, nbytes=alone.nbytes + read_too)


def _is_alone(
    out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, overwrites: bool = False
) -> bool:
    """Return whether there is no other product to choose, and this one takes little memory beside `out`."""
    return is_selected("torch") and not is_widened(a) and out.numel() <= MOST_NARROW


@add_product_.implementation("torch", suits=_is_alone)
@add_product_.implementation("whole", devices=GPU)
def _whole_product(
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
