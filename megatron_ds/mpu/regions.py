"""Boundaries of parallel regions: each pairs a collective in forward with its adjoint in backward.

    name                                   forward                 backward
    copy_to_region                         identity                all-reduce            f      of Megatron
    reduce_from_region                     all-reduce              identity              g
    scatter_to_region                      slice                   all-gather
    gather_from_region                     all-gather              slice
    scatter_to_sequence_region             slice of dim 0          all-gather
    gather_from_sequence_region            all-gather of dim 0     reduce-scatter        g
    reduce_scatter_to_sequence_region      reduce-scatter          all-gather            g-bar
    first_of_sequence                      broadcast from rank 0   rank 0 keeps it

Shoeybi et al. 2019 (arXiv:1909.08053), section 3; Korthikanti et al. 2022 (arXiv:2205.05198), section 4.2,
for the sequence regions. All are collective over `group`, forward and backward, and do nothing for a group
of one. Inputs are never modified. Backward may run in another thread, so each keeps its group in `ctx`.
"""

import torch
from torch.autograd import Function

from . import collectives
from .group import Group


def copy_to_region(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Enter a region in which ranks compute different results from the same `x`; the gradients are summed."""
    return _Copy.apply(x, group) if group.size > 1 else x


def reduce_from_region(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Leave a region in which each rank has a partial sum."""
    return _Reduce.apply(x, group) if group.size > 1 else x


def scatter_to_region(x: torch.Tensor, group: Group, dim: int = -1) -> torch.Tensor:
    """This rank's piece of `dim` of an `x` that all ranks hold. Raises LayoutError if it is not divisible."""
    return _Scatter.apply(x, group, dim) if group.size > 1 else x


def gather_from_region(x: torch.Tensor, group: Group, dim: int = -1) -> torch.Tensor:
    """Concatenate the pieces of `dim`. All ranks must compute the same from it: its gradient is sliced."""
    return _Gather.apply(x, group, dim) if group.size > 1 else x


def scatter_to_sequence_region(x: torch.Tensor, group: Group) -> torch.Tensor:
    """This rank's slice of the sequence of an `x` that all ranks hold: [s, b, h] → [s / t, b, h]."""
    return scatter_to_region(x, group, dim=0)


def gather_from_sequence_region(
    x: torch.Tensor, group: Group, grad: str = "reduce_scatter"
) -> torch.Tensor:
    """Return the whole sequence from the ranks' slices: [s / t, b, h] → [s, b, h].

    grad  "reduce_scatter" where ranks compute different results from it (a column-parallel linear), so that
          the gradient is a partial sum; "split" where all ranks compute the same and have the same gradient
    """
    assert grad in ("reduce_scatter", "split"), (
        f"grad={grad!r} is neither 'reduce_scatter' nor 'split'"
    )
    if grad == "split":
        return gather_from_region(x, group, dim=0)
    return _GatherSequence.apply(x, group) if group.size > 1 else x


def reduce_scatter_to_sequence_region(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Sum the ranks' partial sums and keep this rank's slice of the sequence: [s, b, h] → [s / t, b, h].

    Raises LayoutError if s % t != 0.
    """
    return _ReduceScatterSequence.apply(x, group) if group.size > 1 else x


def first_of_sequence(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the first position of a sequence of which each rank holds a slice: [s / t, b, h] → [b, h] on all ranks.

    All ranks must compute the same from it: the gradient of rank 0 is used.
    """
    return _First.apply(x, group) if group.size > 1 else x[0]


def _all_reduced(x: torch.Tensor, group: Group) -> torch.Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    collectives.all_reduce_(total, group)
    return total


class _Copy(Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return _all_reduced(grad, ctx.group), None


class _Reduce(Function):
    @staticmethod
    def forward(ctx, x, group):
        return _all_reduced(x, group)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class _Scatter(Function):
    @staticmethod
    def forward(ctx, x, group, dim):
        ctx.group = group
        ctx.dim = dim
        return collectives.shard(x, group, dim)

    @staticmethod
    def backward(ctx, grad):
        return collectives.all_gather(grad, ctx.group, ctx.dim), None, None


class _Gather(Function):
    @staticmethod
    def forward(ctx, x, group, dim):
        ctx.group = group
        ctx.dim = dim
        return collectives.all_gather(x, group, dim)

    @staticmethod
    def backward(ctx, grad):
        return collectives.shard(grad, ctx.group, ctx.dim), None, None


class _GatherSequence(Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return collectives.all_gather(x, group)

    @staticmethod
    def backward(ctx, grad):
        return collectives.reduce_scatter(grad, ctx.group), None


class _ReduceScatterSequence(Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return collectives.reduce_scatter(x, group)

    @staticmethod
    def backward(ctx, grad):
        return collectives.all_gather(grad, ctx.group), None


class _First(Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        ctx.shape = x.shape
        first = x[0].clone(memory_format=torch.contiguous_format)
        collectives.broadcast_(first, group)
        return first

    @staticmethod
    def backward(ctx, grad):
        dx = grad.new_zeros(ctx.shape)
        if ctx.group.rank == 0:
            dx[0] = grad
        return dx, None
