"""Exchange of rows for columns: a rank has some rows of a matrix, then some columns of all rows.

    name               forward                              backward
    columns_of_rows    [n, h] → [t n, h/t]                  rows_of_columns
    rows_of_columns    [t n, h/t] → [n, h]                  columns_of_rows

Rows are in the order of the ranks. Each is one all-to-all, collective over `group` of t ranks, and does
nothing for a group of one; a rank sends (t-1)/t of its matrix, where an all-gather of the rows would send t-1
times as much as it has.
"""

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ..errors import LayoutError
from . import collectives
from .group import Group


def columns_of_rows(x: torch.Tensor, group: Group) -> torch.Tensor:
    """x [n, h] of each rank → this rank's columns of all rows. Raises LayoutError unless t divides h."""
    if x.shape[1] % group.size:
        raise LayoutError(
            f"{x.shape[1]} columns are not divisible by {group.size}, the size of the "
            f"{group.axes} group, whose ranks hold equal parts of them. Use a multiple of it."
        )
    return _ToColumns.apply(x, group) if group.size > 1 else x


def rows_of_columns(x: torch.Tensor, group: Group) -> torch.Tensor:
    """x [t n, h/t] → all columns of this rank's rows."""
    return _ToRows.apply(x, group) if group.size > 1 else x


def _columns(x: torch.Tensor, group: Group) -> torch.Tensor:
    pieces = x.view(len(x), group.size, -1).transpose(0, 1).contiguous()  # [t, n, h/t]
    out = torch.empty_like(pieces)
    collectives.all_to_all_(out.view(-1), pieces.view(-1), group)
    return out.flatten(0, 1)


def _rows(x: torch.Tensor, group: Group) -> torch.Tensor:
    pieces = torch.empty_like(x, memory_format=torch.contiguous_format)
    collectives.all_to_all_(pieces.view(-1), x.contiguous().view(-1), group)
    return pieces.view(group.size, -1, x.shape[1]).transpose(0, 1).flatten(1)


class _ToColumns(Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return _columns(x.contiguous(), group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return _rows(grad, ctx.group), None


class _ToRows(Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return _rows(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return _columns(grad.contiguous(), ctx.group), None
