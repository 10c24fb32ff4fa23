"""Gradients of weights on a GPU: products of 16-bit factors that are added to fp32 sums without being rounded.

torch's `addmm` with `out_dtype` adds in the epilogue of the product: the sum is read and written once, and there is
no 16-bit product in memory. Builds of torch differ in the dtypes that they accept, so a small product is compared
before the first use; where it is refused or wrong, the product is rounded to 16 bits and added by a pass of its own.
"""

import functools
import logging

import torch

from ....ops import product
from ....ops.kernel_table import GPU
from ....ops.meta_tensors import has_memory

logger = logging.getLogger(__name__)

DTYPES = (torch.bfloat16, torch.float16)
ROWS = 16
DEPTH = 256
TOLERANCE = 4e-6  # of the largest sum; a rounded product is wrong by 2e-3


def add_product_(
    out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, overwrites: bool = False
) -> None:
    """out += a b, for fp32 `out` [n, m] and 16-bit a [n, k] and b [k, m]; out = a b with `overwrites`."""
    if not has_memory(out):
        return
    if overwrites:
        torch.mm(a, b, out_dtype=torch.float32, out=out)
    else:
        torch.addmm(out, a, b, out_dtype=torch.float32, out=out)


def suits(
    out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, overwrites: bool = False
) -> bool:
    """Return whether the factors are of a 16-bit dtype, so that a product could be rounded."""
    return a.dtype in DTYPES and a.dtype == b.dtype and a.numel() > 0


@functools.cache
def reason_against() -> str:
    """Return why the current CUDA device does not use `add_product_`; "" if it does."""
    if not torch.cuda.is_available():
        return "torch has no GPU"
    try:
        wrong = [dtype for dtype in DTYPES if _error(dtype) > TOLERANCE]
    except (RuntimeError, TypeError, NotImplementedError) as error:
        reason = f"torch {torch.__version__} does not take out_dtype here: {error}"
    else:
        reason = f"sums of {wrong} products are rounded" if wrong else ""
    if reason:
        logger.warning(
            "gradients of weights are rounded to 16 bits before they are added to fp32 sums: %s",
            reason,
        )
    return reason


def _error(dtype: torch.dtype) -> float:
    """Return the largest error of a sum and of a product, over the largest value."""
    draw = torch.Generator().manual_seed(0)
    make = lambda *shape: torch.randn(shape, generator=draw).to("cuda")
    a = make(DEPTH, ROWS).to(dtype).t()
    b = make(DEPTH, 2 * ROWS).to(dtype)
    out = make(ROWS, 2 * ROWS)
    exact = a.double() @ b.double()
    errors = []
    for overwrites, expected in ((False, out.double() + exact), (True, exact)):
        add_product_(out, a, b, overwrites)
        errors.append((out.double() - expected).abs().max() / expected.abs().max())
    return max(error.item() for error in errors)


product.add_product_.kernel(
    product.FP32_SUMS,
    devices=GPU,
    dtypes=(torch.float32,),
    suits=suits,
    available=reason_against,
    is_opaque=False,  # torch multiplies
)(add_product_)
