"""Numbers in fewer bits, for collectives that send less: symmetric 8-bit or 4-bit integers with a scale for
each block of neighbours (Dettmers et al. 2022, arXiv:2110.02861, section 2.1; Wang et al. 2023,
arXiv:2306.10209, section 3).

Gathers of weights and reductions of gradients of ZeRO send them (zero/number_blocks.py).

Implementations: on GPUs one launch each; on CPUs blocks are compiled
; else torch's operations. All have the same bits, and none has a gradient.
"""

from functools import partial

import torch
import torch.nn.functional as F

from .kernel_table import Operation, random_generator, random_tensors

EXAMPLE_BLOCK = 64


@Operation
def quantize(
    x: torch.Tensor, bits: int, block: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """x, of any shape → (codes int8 [⌈n bits / 8⌉], scales fp32 [⌈n / block⌉]) of its n numbers in order.

    bits: 8 or 4, two codes a byte, the first in the low half. block: numbers that share a scale, even. A
    block with infinity or NaN has the scale NaN, one whose scale is 0 in fp32 the codes 0.
    """
    x = x.detach().float().flatten()
    numel = len(x)
    most = 2 ** (bits - 1) - 1
    # Blocks as rows; the last one is padded with zeros.
    blocks = -(-numel // block)
    if numel % block:
        x = F.pad(x, (0, blocks * block - numel))
    table = x.view(blocks, block)
    largest = table.abs().amax(1)
    scales = largest * (1 / most)
    scales = scales.where(scales.isfinite(), torch.nan)
    of_rows = scales[:, None]
    codes = table / of_rows
    codes.round_()
    codes.clamp_(-most, most)
    # Blocks of zeros have the scale 0.
    codes = codes.where(of_rows > 0, 0)
    codes = codes.to(torch.int8).flatten()
    codes = codes[:numel]
    if bits == 4:
        codes = _in_pairs(codes)
    return codes, scales


@Operation
def dequantize(
    scales: torch.Tensor,
    codes: torch.Tensor,
    numel: int,
    bits: int,
    block: int,
    dtype: torch.dtype,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return what `quantize` made of `numel` numbers → [numel] of `dtype`: codes times scales, rounded once.

    out: contiguous memory for the result; None: new memory
    """
    # A number's code and its scale, in fp32.
    if bits == 4:
        codes = _apart(codes)
    codes = codes[:numel]
    scales = scales.detach().float()
    # The last block may be shorter than the others.
    if numel % block:
        numbers = codes * scales.repeat_interleave(block)[:numel]
    else:
        numbers = (codes.view(-1, block) * scales[:, None]).view(-1)
    return numbers.to(dtype) if out is None else out.copy_(numbers)


def _quantize_example(
    bits: int, rows: int, width: int, dtype: torch.dtype, device: torch.device
) -> tuple:
    return random_tensors(dtype, device, (rows, width))[0].detach(), bits, EXAMPLE_BLOCK


def _dequantize_example(
    bits: int, rows: int, width: int, dtype: torch.dtype, device: torch.device
) -> tuple:
    where = random_generator(device, rows * width).device
    x, *how = _quantize_example(bits, rows, width, torch.float32, where)
    codes, scales = quantize.in_torch(x, *how)
    codes = codes.to(device)
    scales = scales.to(device)
    return scales, codes, x.numel(), *how, dtype


def _narrow_example(
    bits: int, rows: int, width: int, dtype: torch.dtype, device: torch.device
) -> tuple:
    """Into 16 bits, whatever the dtype of the scales."""
    return _dequantize_example(bits, rows, width, torch.bfloat16, device)


for _bits in (4, 8):
    quantize.example(partial(_quantize_example, _bits))
    dequantize.example(partial(_dequantize_example, _bits))
    dequantize.example(partial(_narrow_example, _bits))


def _in_pairs(codes: torch.Tensor) -> torch.Tensor:
    """4-bit codes, two a byte."""
    low, high = F.pad(codes, (0, len(codes) % 2)).view(-1, 2).unbind(1)
    return low & 15 | high << 4


def _apart(codes: torch.Tensor) -> torch.Tensor:
    """Bytes of two codes → the codes, with their signs."""
    low = (codes & 15 ^ 8) - 8
    high = codes >> 4
    return torch.stack((low, high), 1).flatten()
