"""`causal_conv`: a convolution along the tokens of each channel by itself, which sees earlier tokens alone.

    y_t = b + Σ_j w_j x_{t-J+1+j},   j from 0 to J - 1, without tokens of other documents

A few taps (4 in published models) are as many products of whole tensors, so channels may be divided among ranks, and
documents kept apart, without other bits. A model's layout of activations, [s, b, c], is kept: nothing is transposed.
"""

import torch
import torch.nn.functional as F

from ...ops.kernel_table import Operation, random_generator, random_tensors
from ...ops.work import CallWork


@Operation
def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    documents: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return silu(y) [s, b, c] in the dtype of x, computed in fp32 at least.

    x          [s, b, c]
    weight     [c, J], the last tap is that of the token itself
    bias       [c] or None
    documents  int64 [b, s], not decreasing; None: sequences are one document
    """
    # Taps before the first token see zeros.
    taps = weight.shape[1]
    s = len(x)
    wide = torch.promote_types(x.dtype, torch.float32)
    before = taps - 1
    padded = F.pad(x.to(wide), (0, 0, 0, 0, before, 0))
    weight = weight.to(wide)
    # The token itself, and then earlier ones.
    y = padded[before:] * weight[:, -1]
    for back in range(1, taps):
        first = before - back
        earlier = padded[first : first + s] * weight[:, first]
        if documents is not None:
            earlier = earlier * _same_document(documents, back, wide)
        y = y + earlier
    if bias is not None:
        y = y + bias.to(wide)
    return F.silu(y).to(x.dtype)


def _same_document(
    documents: torch.Tensor, back: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return [s, b, 1], 1 where the token so many places before belongs to the same document, else 0."""
    same = documents[:, back:] == documents[:, :-back]
    # The first tokens have none before them. Sequences may be shorter than the taps.
    padded = F.pad(same.to(dtype), (back, 0))
    of_tokens = padded.t()[: documents.shape[1]]
    return of_tokens.unsqueeze(-1)


def last_tokens(
    x: torch.Tensor,
    ends: torch.Tensor,
    count: int,
    documents: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the tokens of x [s, c] up to `ends`, int64 [texts], which the convolution of the token after each sees:
    [texts, count, c], 0 for those before its document.

    documents: int64 [1, s], as above
    """
    back = torch.arange(count - 1, -1, -1, device=ends.device)
    places = ends[:, None] - back
    is_there = places >= 0
    places = places.clamp(min=0)
    if documents is not None:
        ids = documents[0]
        is_there &= ids[places] == ids[ends][:, None]
    return x[places].masked_fill(~is_there.unsqueeze(-1), 0)


causal_conv.benchmark_sizes = ((8192, 4096),)


@causal_conv.example
def _conv_example(
    rows: int,
    width: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple:
    shapes = ((rows, 2, width), (width, 4), (width,))
    x, weight, bias = random_tensors(dtype, device, *shapes)
    # A document ends after one of five tokens.
    draw = random_generator(device, 2 * rows)
    chances = torch.rand(2, rows, generator=draw, device=draw.device)
    ends = chances < 0.2
    documents = ends.cumsum(1).to(device)
    return x, weight, bias, documents


@causal_conv.states_work()
def _conv_work(x, weight, bias=None, documents=None) -> CallWork:
    """State that it multiplies no matrices, reads its input and writes as much."""
    return CallWork(nbytes=2 * x.numel() * x.element_size(), dtype=x.dtype)
