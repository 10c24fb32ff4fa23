"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864, section 3.4.2), in Megatron's arrangement.

The first r = percent * d channels of a head are rotated, channel i together with channel i + r/2 ("rotate
half"); the rest pass unchanged. Pair i is rotated by the angle position * base^(-2i / r), unless the
frequencies are scaled (rotary_scaling.py). Interleaved, pair i are the neighbours 2i and 2i + 1 (GPT-J).

Packed heads, [s, b, g, n/g + 2, d], are g groups of n/g heads of q, one of k and one of v.

Implementations: on GPUs one launch, but for interleaved pairs; on a CPU a compiled one
; else torch's operations in fp32, with a backward of our own that keeps nothing of x.
"""

from collections.abc import Sequence

import torch

from .kernel_table import Operation, random_tensors
from .rotary_scaling import Scaling


def rotary_channels(head_dim: int, percent: float = 1.0) -> int:
    """Number of channels of a head that are rotated, even. percent: from 0 to 1."""
    channels = int(head_dim * percent)
    return channels - channels % 2


def rotary_tables(
    positions: torch.Tensor,
    channels: int,
    base: float = 10000.0,
    scalings: Sequence[Scaling] = (),
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, fp32 [s, 1, 1, r/2] for `positions` [s], [s, b, 1, r/2] for [b, s], for all layers.

    channels  r, how many of a head are rotated
    scalings  of the frequencies, applied in this order; their amplitudes are factors of both tables
    """
    device = positions.device
    even = torch.arange(0, channels, 2, dtype=torch.float32, device=device)
    exponents = even / channels
    # Positions as [s, 1] or [s, b].
    if positions.dim() == 1:
        where = positions.float()[:, None]
    else:
        where = positions.t().float()
    # The frequency of each pair, scaled.
    frequencies = base**-exponents
    amplitude = 1.0
    for scaling in scalings:
        frequencies = scaling(frequencies)
        amplitude *= scaling.amplitude
    # Tables of the angle of each position and pair.
    angles = where[:, :, None, None] * frequencies
    cos = angles.cos()
    sin = angles.sin()
    if amplitude == 1:
        return cos, sin
    return cos * amplitude, sin * amplitude


@Operation
def apply_rotary(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False
) -> torch.Tensor:
    """Rotate x [s, b, n, d] by the tables of its positions. Computed in fp32."""
    if torch.compiler.is_compiling():  # which does not trace writing to strided parts
        return reference_rotary(x, cos, sin, interleaved)
    return _Rotate.apply(x, cos, sin, interleaved)


# six heads: so many positions that no cache has them
apply_rotary.benchmark_sizes = ((65536, 128),)


@apply_rotary.example
def _rotary_example(
    rows: int, width: int, dtype: torch.dtype, device: torch.device
) -> tuple:
    positions = torch.arange(3, 3 + rows, device=device)
    (x,) = random_tensors(dtype, device, (rows, 2, 3, width))
    return (x, *rotary_tables(positions, rotary_channels(width, 0.75)))


def split_heads(qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Packed heads → q [s, b, n, d], k and v [s, b, g, d], views where strides allow them."""
    # The backward of one split is one concatenation.
    heads = qkv.shape[3] - 2
    if heads == 1:  # a key and a value for each query
        q, k, v = qkv.unbind(3)
        return q, k, v
    q, k, v = qkv.split((heads, 1, 1), dim=3)
    return q.flatten(2, 3), k.squeeze(3), v.squeeze(3)


@Operation
def split_rotary(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`split_heads`, q and k rotated by the tables of their positions."""
    # Values are not rotated.
    q, k, v = split_heads(qkv)
    return (
        apply_rotary(q, cos, sin, interleaved),
        apply_rotary(k, cos, sin, interleaved),
        v,
    )


split_rotary.benchmark_sizes = ((16384, 128),)  # 24 heads


@split_rotary.example
def _packed_example(
    rows: int, width: int, dtype: torch.dtype, device: torch.device
) -> tuple:
    # Two samples, three groups of two heads of q, and one of k and of v.
    positions = torch.arange(3, 3 + rows, device=device)
    (qkv,) = random_tensors(dtype, device, (rows, 2, 3, 4, width))
    return (qkv, *rotary_tables(positions, rotary_channels(width, 0.75)))


def reference_rotary(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False
) -> torch.Tensor:
    """`apply_rotary` with autograd's own backward."""
    # The pairs that are rotated, and the channels that are not.
    channels = 2 * cos.shape[-1]
    rotated, rest = x.float().split([channels, x.shape[-1] - channels], dim=-1)
    if interleaved:
        first = rotated[..., 0::2]
        second = rotated[..., 1::2]
    else:
        first, second = rotated.chunk(2, dim=-1)
    # Both channels of each pair, in the places that they came from.
    halves = (
        first * cos - second * sin,
        second * cos + first * sin,
    )
    if interleaved:
        turned = torch.stack(halves, dim=-1).flatten(-2)
    else:
        turned = torch.cat(halves, dim=-1)
    return torch.cat((turned, rest), dim=-1).to(x.dtype)


class _Rotate(torch.autograd.Function):
    """A rotation whose gradient is rotated by the opposite angle, so that nothing of x is kept."""

    @staticmethod
    def forward(ctx, x, cos, sin, interleaved):
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _rotate(x, cos, sin, interleaved, 1)

    @staticmethod
    def backward(ctx, grad):
        return _rotate(grad, *ctx.saved_tensors, ctx.interleaved, -1), None, None, None


def _rotate(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    direction: int,
) -> torch.Tensor:
    """x rotated in fp32. direction: 1 forward, -1 for the gradient."""
    # Views of the parts of the input and of the result.
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    count = cos.shape[-1]
    first, second, rest = _pairs(x, count, interleaved)
    out_first, out_second, out_rest = _pairs(out, count, interleaved)
    # Each result is written in place.
    torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-direction)
    torch.mul(second, cos, out=out_second).addcmul_(first, sin, value=direction)
    out_rest.copy_(rest)
    return out.to(x.dtype)


def _pairs(
    x: torch.Tensor, count: int, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the first and the second channels of the pairs [.., count], and the channels that are not rotated."""
    channels = 2 * count
    turned, rest = x.split([channels, x.shape[-1] - channels], dim=-1)
    if interleaved:
        return turned[..., ::2], turned[..., 1::2], rest
    first, second = turned.split(count, dim=-1)
    return first, second, rest
