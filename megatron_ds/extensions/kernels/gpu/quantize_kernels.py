"""Numbers as 8-bit or 4-bit integers with scales of blocks: csrc/gpu/quantize.cu.

The operations are those of ../quantize.py, with the same arguments.
"""

import torch

from ....ops import quantize as ops_quantize
from ....ops.kernel_table import FLOATS, GPU
from .gpu_kernel import GpuKernel, type_name
from .packets import vector_width

# of a block; of a block of `quantize`, one a block of numbers
THREADS = 256
WARPS = 4
MOST = 2**31 - 1  # blocks of numbers

EXAMPLES = [
    ("bf16", 8, 8),
    ("bf16", 8, 4),
    ("fp16", 8, 8),
    ("float", 4, 8),
    ("float", 4, 4),
]
QUANTIZE = GpuKernel("quantize.cu", "quantize", "ptr ptr ptr i64 i32 u32", EXAMPLES)
DEQUANTIZE = GpuKernel("quantize.cu", "dequantize", "ptr ptr ptr i64 i32", EXAMPLES)


def fits_numbers(x: torch.Tensor, *_: object) -> str:
    """ "" if there are few enough numbers in x for any kernel here, else the reason."""
    return f"{x.numel()} numbers are more than {MOST}" if x.numel() > MOST else ""


def fits_codes(scales: torch.Tensor, codes: torch.Tensor, *_: object) -> str:
    """ "" if there are few enough codes for `dequantize`, else the reason."""
    return fits_numbers(codes)


def quantize(
    x: torch.Tensor, bits: int, block: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """x, of any shape → (codes int8, flat; scales fp32, one a block)."""
    x = x.detach().contiguous().view(-1)
    n = len(x)
    blocks = -(-len(x) // block)
    codes = x.new_empty(-(-n * bits // 8), dtype=torch.int8)
    scales = x.new_empty(blocks, dtype=torch.float32)
    QUANTIZE(
        (type_name(x), vector_width([n, block], x), bits),
        -(-blocks // WARPS),
        32 * WARPS,
        x,
        codes,
        scales,
        n,
        block,
        blocks,
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
    """Return what `quantize` made → numbers [numel] of `dtype`, in `out` if it is given."""
    scales = scales.detach().contiguous()
    codes = codes.contiguous()
    y = scales.new_empty(numel, dtype=dtype) if out is None else out
    width = vector_width([numel, block], y)
    each = max(width, 8 // bits)
    if vector_width([each * bits // 8], codes) < each * bits // 8:
        codes = codes.clone()  # at an aligned address
    DEQUANTIZE(
        (type_name(y), width, bits),
        -(-numel // (each * THREADS)),
        THREADS,
        codes,
        scales,
        y,
        numel,
        block,
    )
    return y


ops_quantize.quantize.kernel("cuda", devices=GPU, dtypes=FLOATS, fits=fits_numbers)(
    quantize
)
ops_quantize.dequantize.kernel(
    "cuda", devices=GPU, dtypes=(torch.float32,), fits=fits_codes
)(dequantize)
