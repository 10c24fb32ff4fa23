"""Movement of rows of unequal numbers between ranks, and its adjoint in backward.

    name                     forward                              backward
    all_to_all_rows          piece i to rank i                    the pieces back
    all_gather_rows          the rows of all ranks, in order      sum of the ranks' gradients of the own rows
    reduce_scatter_rows      sum of the ranks' pieces i           all-gather

`counts` are numbers of rows, by rank, which all ranks of the group know and may be 0. Rows are the first
dimension. All are collective over `group`, forward and backward, and do nothing for a group of one. Sums are
added in the order of the ranks.
"""

from collections.abc import Sequence

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from . import collectives
from .group import DONE, Group, Work

Counts = Sequence[int]


class Waiting:
    """An all-to-all under way. `wait` returns when its rows may be read; again at once."""

    def __init__(self):
        self.work: Work = DONE

    def wait(self) -> None:
        """Wait for the rows."""
        work = self.work
        self.work = DONE
        work.wait()


def all_to_all_rows(
    x: torch.Tensor,
    sent: Counts,
    received: Counts,
    group: Group,
    waiting: Waiting | None = None,
) -> torch.Tensor:
    """Return the first sent[0] rows of x go to rank 0, the next sent[1] to rank 1, …; received[j] come from rank j.

    waiting: the rows may be read after `waiting.wait()`; None waits at once.
    """
    if group.size == 1:
        return x
    return _AllToAll.apply(x, tuple(sent), tuple(received), group, waiting)


def all_gather_rows(x: torch.Tensor, counts: Counts, group: Group) -> torch.Tensor:
    """x [counts[rank], ..] of each rank → [sum(counts), ..]. Ranks compute different results from it."""
    return _Gather.apply(x, tuple(counts), group) if group.size > 1 else x


def reduce_scatter_rows(x: torch.Tensor, counts: Counts, group: Group) -> torch.Tensor:
    """x [sum(counts), ..], a partial sum on each rank → the sums of this rank's rows, [counts[rank], ..]."""
    return _ReduceScatter.apply(x, tuple(counts), group) if group.size > 1 else x


def _all_to_all(
    x: torch.Tensor,
    sent: Counts,
    received: Counts,
    group: Group,
    waiting: Waiting | None,
) -> torch.Tensor:
    out = x.new_empty((sum(received), *x.shape[1:]))
    work = collectives.all_to_all_(
        out, x.contiguous(), group, (sent, received), async_op=waiting is not None
    )
    if waiting is not None:
        waiting.work = work
    return out


def gathered_rows(x: torch.Tensor, counts: Counts, group: Group) -> torch.Tensor:
    """`all_gather_rows` without autograd."""
    out = x.new_empty((sum(counts), *x.shape[1:]))
    pieces = out.split(list(counts))
    others = [i for i in range(group.size) if i != group.rank]
    collectives.exchange(
        [(x, i) for i in others if x.numel()],
        [(pieces[i], i) for i in others if pieces[i].numel()],
        group,
    )
    pieces[group.rank].copy_(x)
    return out


def summed_rows(x: torch.Tensor, counts: Counts, group: Group) -> torch.Tensor:
    """`reduce_scatter_rows` without autograd."""
    pieces = x.contiguous().split(list(counts))
    mine = pieces[group.rank]
    parts = [
        mine if i == group.rank else torch.empty_like(mine) for i in range(group.size)
    ]
    others = [i for i in range(group.size) if i != group.rank]
    collectives.exchange(
        [(pieces[i], i) for i in others if pieces[i].numel()],
        [(parts[i], i) for i in others if mine.numel()],
        group,
    )
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


class _AllToAll(Function):
    @staticmethod
    def forward(ctx, x, sent, received, group, waiting):
        ctx.route = received, sent, group
        return _all_to_all(x, sent, received, group, waiting)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return _all_to_all(grad, *ctx.route, None), None, None, None, None


class _Gather(Function):
    @staticmethod
    def forward(ctx, x, counts, group):
        ctx.counts = counts
        ctx.group = group
        return gathered_rows(x.contiguous(), counts, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return summed_rows(grad, ctx.counts, ctx.group), None, None


class _ReduceScatter(Function):
    @staticmethod
    def forward(ctx, x, counts, group):
        ctx.counts = counts
        ctx.group = group
        return summed_rows(x, counts, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return gathered_rows(grad.contiguous(), ctx.counts, ctx.group), None, None
