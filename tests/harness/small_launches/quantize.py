"""Numbers in 8 and 4 bits."""

import torch

from megatron_ds.ops.gpu import quantize_kernels


def launch() -> None:
    """Packets of 16 bytes and single numbers; several turns of a warp; a short last block."""
    for dtype, n, block in ((torch.bfloat16, 2056, 1032), (torch.float32, 333, 70)):
        x = torch.ones(n, dtype=dtype)
        for bits in (8, 4):
            codes, scales = quantize_kernels.quantize(x, bits, block)
            quantize_kernels.dequantize(scales, codes, n, bits, block, dtype)
        for fp8 in quantize_kernels.MANTISSA:
            quantize_kernels.cast_fp8(x, torch.ones(1), fp8)
