"""Ulysses: each rank has all tokens of some of the heads during attention (Jacobs et al. 2023,
arXiv:2309.14509).

    q, k, v   [s/c, b, n, d]  ── all-to-all ──  [s, b, n/c, d] ── attention ── [s, b, n/c, d] ── all-to-all ──
    out       [s/c, b, n, d]

With fewer key-value heads than ranks, each rank receives the one head that its query heads read, so several
ranks receive the same one and their gradients of it are summed by its owners: max(g, c) heads are sent.

Letters: s positions, b samples, n query heads, g key-value heads, d channels, c ranks.
"""

from collections.abc import Sequence

import torch
from torch.autograd.function import once_differentiable

from ..mpu.collectives import all_to_all_
from ..mpu.group import Group


def to_heads(tensors: tuple[torch.Tensor, ...], group: Group,
             order: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    """Tensors [s/c, b, heads, d] of the rank's tokens → [s, b, heads/c, d] of its heads.

    heads must be a multiple of the ranks. order: positions of the tokens in the order of the ranks, None if
    ascending. One all-to-all, and one in backward.
    """
    return _ToHeads.apply(group, order, *tensors)


def to_tokens(out: torch.Tensor, group: Group, order: torch.Tensor | None = None) -> torch.Tensor:
    """[s, b, heads/c, d] of the rank's heads → [s/c, b, heads, d] of its tokens, as before `to_heads`."""
    return _ToTokens.apply(group, order, out)


def spread_groups(t: torch.Tensor, ranks: int) -> torch.Tensor:
    """[s, b, g, d] → [s, b, max(g, ranks), d]: each rank has a head to receive. g divides ranks or is a
    multiple of it."""
    groups = t.shape[2]
    return t if groups >= ranks else t.repeat_interleave(ranks // groups, 2)


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, group, order, *tensors):
        ctx.group, ctx.order = group, order
        return _divide_heads(tensors, group, order)

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        return None, None, *_divide_tokens(gradients, ctx.group, ctx.order)


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, group, order, out):
        ctx.group, ctx.order = group, order
        return _divide_tokens((out,), group, order)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        return None, None, _divide_heads((gradient,), ctx.group, ctx.order)[0]


# Results are allocated before what is freed on return: a heap that keeps freed memory has no holes below
# them.


def _divide_heads(tensors: Sequence[torch.Tensor], group: Group,
                  order: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """[s/c, b, heads, d] → [s, b, heads/c, d]. One copy to pack them, one more if an order is given."""
    parts = [t.unflatten(2, (group.size, -1)).permute(2, 0, 1, 3, 4) for t in tensors]  # [c, s/c, b, h/c, d]
    widths = [part.shape[3] for part in parts]
    ranks, s, b, _, d = parts[0].shape
    whole = tensors[0].new_empty(ranks * s, b, sum(widths), d)
    received = whole if order is None else torch.empty_like(whole)
    all_to_all_(received.view(-1), torch.cat(parts, 3).contiguous().view(-1), group)
    if order is not None:
        torch.index_select(received, 0, order.argsort(), out=whole)
    return whole.split(widths, 2)


def _divide_tokens(tensors: Sequence[torch.Tensor], group: Group,
                   order: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """[s, b, heads/c, d] → [s/c, b, heads, d]: the inverse of `_divide_heads`."""
    parts = [t.unflatten(0, (group.size, -1)) for t in tensors]                         # [c, s/c, b, h/c, d]
    results = [part.new_empty(*part.shape[1:3], group.size, *part.shape[3:]) for part in parts]
    packed = torch.cat(tensors, 2) if len(tensors) > 1 else tensors[0]
    packed = packed.contiguous() if order is None else packed.index_select(0, order)
    received = torch.empty_like(packed)
    all_to_all_(received.view(-1), packed.view(-1), group)
    pieces = received.unflatten(0, (group.size, -1)).split([part.shape[3] for part in parts], 3)
    for result, piece in zip(results, pieces, strict=True):
        result.copy_(piece.permute(1, 2, 0, 3, 4))
    return tuple(result.flatten(2, 3) for result in results)
