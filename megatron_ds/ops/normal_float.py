"""NF4: weights in 4 bits, as one of 16 numbers times the largest |w| of a block (Dettmers et al. 2023,
arXiv:2305.14314, section 3 and appendix E).

The 16 numbers lie between -1 and 1 and have 0 among them. Each stands for an equal share of normally distributed
weights, so that they are near to each other around 0, where most weights are. A weight becomes the nearest one.

    bytes   |c1 c0|c3 c2| ..      codes from 0 to 15, two a byte, the first in the low half
    scales  one fp32 number for each block

Torch's operations alone: decoding is one look-up of a pair of numbers for each byte, and one product, for at most
AT_ONCE numbers at a time, so that what is in fp32 meanwhile is small beside the weights of a layer. The host does not
wait for a device.
"""

from functools import cache

import torch

# Numbers that are decoded at a time, a multiple of any block.
AT_ONCE = 1 << 23
# Appendix E of the paper.
LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


def encode_normal(x: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x, flat, whole blocks → (codes uint8 [n / 2], scales fp32 [n / block]). A block of zeros has the scale 0."""
    table = x.detach().float().view(-1, block)
    scales = table.abs().amax(1)
    inside = table / scales.where(scales > 0, 1)[:, None]
    codes = torch.bucketize(inside.flatten(), _borders(x.device)).to(torch.uint8)
    low, high = codes.view(-1, 2).unbind(1)
    return low | high << 4, scales


def decode_normal(
    codes: torch.Tensor, scales: torch.Tensor, block: int, out: torch.Tensor
) -> torch.Tensor:
    """Write the numbers into `out`, flat, of any float dtype, each rounded once, and return it."""
    for start in range(0, len(out), AT_ONCE):
        stop = min(start + AT_ONCE, len(out))
        of_bytes = codes[start // 2 : stop // 2]
        of_blocks = scales[start // block : stop // block]
        _decode_part(of_bytes, of_blocks, out[start:stop])
    return out


def _decode_part(codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
    pairs = _pairs(out.device).index_select(0, codes.int())
    by_block = pairs.view(len(scales), -1)
    out.copy_(by_block.mul_(scales[:, None]).view(-1))


def bytes_of_decoding(numel: int) -> int:
    """Most bytes that `decode_normal` of so many numbers takes beside its arguments: of each byte an int32, and two
    fp32 numbers."""
    return min(numel, AT_ONCE) // 2 * (4 + 2 * 4)


@cache
def _borders(device: torch.device) -> torch.Tensor:
    """Return the middles between neighbours."""
    levels = torch.tensor(LEVELS)
    return ((levels[1:] + levels[:-1]) / 2).to(device)


@cache
def _pairs(device: torch.device) -> torch.Tensor:
    """[256, 2]: the two numbers of each byte."""
    byte = torch.arange(256)
    levels = torch.tensor(LEVELS)
    return torch.stack((levels[byte & 15], levels[byte >> 4]), 1).to(device)
