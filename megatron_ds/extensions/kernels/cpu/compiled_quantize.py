"""Blocks of integers, compiled from csrc/elementwise/quantize.cpp: an optional extension, one pass over memory where
torch's operations take ten.
"""

import functools
import logging
from types import ModuleType
from typing import Any

import torch

from ....host import load_compiled
from ....ops import quantize as ops_quantize
from ....ops.kernel_table import CPU
from ....ops.meta_tensors import has_memory

logger = logging.getLogger(__name__)

DTYPES = (torch.float32, torch.bfloat16)


@functools.cache
def extension() -> ModuleType | Any:
    """Return the compiled operations; None, with one line in the log, where the package was installed without a
    compiler."""
    return load_compiled(
        "_quantize",
        "quantization",
        "torch's operations run instead, slower by far",
        logger,
    )


def quantize(
    x: torch.Tensor, bits: int, block: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`ops.quantize.quantize` of x with memory on the CPU, of one of `DTYPES`."""
    x = x.detach().contiguous()
    n = x.numel()
    codes = x.new_empty(-(-n * bits // 8), dtype=torch.int8)
    scales = x.new_empty(-(-n // block), dtype=torch.float32)
    extension().quantize(
        x.data_ptr(),
        codes.data_ptr(),
        scales.data_ptr(),
        n,
        block,
        bits,
        x.dtype == torch.bfloat16,
        torch.get_num_threads(),
    )
    return codes, scales


def dequantize(
    scales: torch.Tensor,
    codes: torch.Tensor,
    numel: int,
    bits: int,
    block: int,
    dtype: torch.dtype,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`ops.quantize.dequantize` in memory of the CPU, to one of `DTYPES`."""
    scales = scales.detach().contiguous()
    codes = codes.contiguous()
    y = scales.new_empty(numel, dtype=dtype) if out is None else out
    extension().dequantize(
        codes.data_ptr(),
        scales.data_ptr(),
        y.data_ptr(),
        numel,
        block,
        bits,
        dtype == torch.bfloat16,
        torch.get_num_threads(),
    )
    return y


def fits_dtype(
    scales: torch.Tensor,
    codes: torch.Tensor,
    numel: int,
    bits: int,
    block: int,
    dtype: torch.dtype,
    out: torch.Tensor | None = None,
) -> str:
    """ "" if `dequantize` has the dtype, else the reason."""
    return "" if dtype in DTYPES else f"{dtype} is neither fp32 nor bf16"


_LIMITS = {
    "devices": CPU,
    "suits": lambda x, *_, **__: has_memory(x),
    "available": lambda: "" if extension() else "not compiled",
}
ops_quantize.quantize.kernel("c++", dtypes=DTYPES, **_LIMITS)(quantize)
ops_quantize.dequantize.kernel(
    "c++", dtypes=(torch.float32,), fits=fits_dtype, **_LIMITS
)(dequantize)
