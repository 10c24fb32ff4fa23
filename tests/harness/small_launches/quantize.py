"""Numbers in 8 and 4 bits."""

import torch

from megatron_ds.extensions.kernels.gpu import quantize_kernels


def launch() -> None:
    """Packets of 16 bytes and single numbers; several turns of a warp; a short last block."""
    for dtype, n, block, bits in (
        (torch.bfloat16, 2056, 1032, 8),
        (torch.float32, 333, 70, 4),
    ):
        x = torch.ones(n, dtype=dtype)
        codes, scales = quantize_kernels.quantize(x, bits, block)
        quantize_kernels.dequantize(scales, codes, n, bits, block, dtype)
