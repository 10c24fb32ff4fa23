"""Compression of a tensor to one bit an element and one scale a unit, with the error that remains. Pure.

A *unit* is what shares a scale: a logical parameter. A flat tensor of n elements is a sequence of blocks of
`ALIGN` elements, each of one unit; `live` is False for elements that are zero by definition or in rows that
are zero on all ranks: they are no part of the norm, and their value after decompression is exactly zero.

    scale     s = ‖y‖ / √(live elements), over all parts of the unit
    bits      b = (y ≥ 0), eight in a byte, the first in the highest bit
    decoded   s (2 b - 1), 0 where not live
    error     y - decoded

Seide et al. 2014 (Interspeech) and Karimireddy et al. 2019 (arXiv:1901.09847) add the error to the next y.
The scale preserves the norm (Tang et al. 2021, arXiv:2102.02888, section 4.2).
"""

import torch

from ...zero.layout import ALIGN

PER_BYTE = 8
# One bit of each of the eight bytes of a little-endian 64-bit number, gathered in its highest byte, the first
# byte in the highest bit: byte i moves by 63 - 9 i, and no two bits meet.
GATHER_BITS = sum(1 << 9 * i for i in range(PER_BYTE)) - (1 << 64)


def pack_signs(y: torch.Tensor) -> torch.Tensor:
    """(y ≥ 0) of a contiguous flat tensor [n], n a multiple of 8, as bytes uint8 [n / 8]."""
    eight = (y >= 0).view(torch.int64)
    bits = (eight * GATHER_BITS) >> 56
    return bits.bitwise_and_(0xFF).to(torch.uint8)


def unpack_signs(packed: torch.Tensor) -> torch.Tensor:
    """fp32 [8 n] of ±1 from bytes [n] of `pack_signs`."""
    table = _table(packed.device)
    rows = packed.view(-1).to(torch.int32)
    return table.index_select(0, rows).view(-1)


def decoded(
    packed: torch.Tensor, scales: torch.Tensor, live: torch.Tensor | None
) -> torch.Tensor:
    """fp32 [n] from bytes [n / 8]. scales: fp32 [n / ALIGN], of each block. live: [n]; None: all are."""
    values = unpack_signs(packed)
    values.view(-1, ALIGN).mul_(scales[:, None])
    return values if live is None else values.mul_(live)


def scale_of(norms: torch.Tensor, roots: torch.Tensor) -> torch.Tensor:
    """Scales of units, fp32. norms: of their live elements; roots: of the number of these, 0 if there are
    none."""
    return torch.where(roots > 0, norms / roots, 0.0).float()


def _table(device: torch.device) -> torch.Tensor:
    """fp32 [256, 8]: the signs, ±1, of each byte."""
    shifts = torch.arange(PER_BYTE - 1, -1, -1, device=device)
    bytes_ = torch.arange(256, device=device)
    bits = bytes_[:, None] >> shifts & 1
    return bits.float().mul_(2).sub_(1)
