"""Ulysses: each rank has all tokens of some of the heads during attention (Jacobs et al. 2023,
arXiv:2309.14509).

    q, k, v   [s/c, b, n, d]  ── all-to-all ──  [s, b, n/c, d] ── attention ── [s, b, n/c, d] ── all-to-all ──
    out       [s/c, b, n, d]

With fewer key-value heads than ranks, each rank receives the one head that its query heads read, so several
ranks receive the same one and their gradients of it are summed by its owners: max(g, c) heads are sent.

Letters: s positions, b samples, n query heads, g key-value heads, d channels, c ranks.
"""

import torch

from ..mpu.collectives import all_to_all_
from ..mpu.group import Group


def to_heads(tensors: tuple[torch.Tensor, ...], group: Group,
             order: torch.Tensor | None = None) -> list[torch.Tensor]:
    """Tensors [s/c, b, heads, d] of the rank's tokens → [s, b, heads/c, d] of its heads.

    heads must be a multiple of the ranks. order: positions of the tokens in the order of the ranks, None if
    ascending. One all-to-all, and one in backward.
    """
    parts = [t.unflatten(2, (group.size, -1)) for t in tensors]               # [s/c, b, c, heads/c, d]
    widths = [part.shape[3] for part in parts]
    packed = torch.cat(parts, 3).permute(2, 0, 1, 3, 4)                       # [c, s/c, b, all heads/c, d]
    whole = _AllToAll.apply(packed.contiguous(), group).flatten(0, 1)
    if order is not None:
        whole = whole.index_select(0, order.argsort())
    return list(whole.split(widths, 2))


def to_tokens(out: torch.Tensor, group: Group, order: torch.Tensor | None = None) -> torch.Tensor:
    """[s, b, heads/c, d] of the rank's heads → [s/c, b, heads, d] of its tokens, as before `to_heads`."""
    if order is not None:
        out = out.index_select(0, order)
    parts = _AllToAll.apply(out.unflatten(0, (group.size, -1)).contiguous(), group)
    return parts.permute(1, 2, 0, 3, 4).flatten(2, 3)


def spread_groups(t: torch.Tensor, ranks: int) -> torch.Tensor:
    """[s, b, g, d] → [s, b, max(g, ranks), d]: each rank has a head to receive. g divides ranks or is a
    multiple of it."""
    groups = t.shape[2]
    return t if groups >= ranks else t.repeat_interleave(ranks // groups, 2)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, pieces, group):
        ctx.group = group
        out = torch.empty_like(pieces)
        all_to_all_(out.view(-1), pieces.view(-1), group)
        return out

    @staticmethod
    def backward(ctx, dout):
        back = torch.empty_like(dout, memory_format=torch.contiguous_format)
        all_to_all_(back.view(-1), dout.contiguous().view(-1), ctx.group)
        return back, None
