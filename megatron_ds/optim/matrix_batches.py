"""`change_matrices`: a function of batches of matrices, applied to all matrices of many parameters.

Matrices of one shape are copied into one batch [n, o, i], so that the function launches as many products for
a model of a hundred layers as for one of one layer.

    unit    matrices of packed queries, keys and values [groups (q + 2) d, h]     of another weight [.., o, i]
    PARTS   three: Q, K and V, each with the rows of all groups                    [o, i]
    HEADS   one [d, h] for each head of each of them                               [o, i]
    WHOLE   one                                                                    [o, i]
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import torch

from ..mpu.param_spec import Matrices

PARTS = "parts"
HEADS = "heads"
WHOLE = "whole"
Views = tuple[
    torch.Tensor, int, int, int
]  # a view, and the matrices, rows and columns that it holds


def change_matrices(
    change: Callable[[torch.Tensor], torch.Tensor],
    unit: str,
    parameters: Sequence[tuple[torch.Tensor, Matrices]],
) -> None:
    """Replace all matrices of the parameters by those that `change` returns: [n, o, i] → [n, o, i]."""
    by_shape: dict[tuple[int, int], list[tuple[torch.Tensor, int]]] = defaultdict(list)
    for tensor, matrices in parameters:
        for view, count, rows, columns in views_of(tensor, matrices, unit):
            by_shape[rows, columns].append((view, count))
    for (rows, columns), members in by_shape.items():
        views = [view for view, _ in members]
        counts = [count for _, count in members]
        batch = views[0].new_empty(sum(counts), rows, columns)
        torch._foreach_copy_(_like(views, batch, counts), views)
        torch._foreach_copy_(views, _like(views, change(batch), counts))


def views_of(tensor: torch.Tensor, matrices: Matrices, unit: str) -> Iterator[Views]:
    """The matrices of one parameter [.., rows, columns], contiguous, as few views.

    The elements of a view are those of its matrices, one after the other, in order.
    """
    columns = tensor.shape[-1]
    if unit == HEADS and matrices.head is not None:
        heads = tensor.view(-1, matrices.head, columns)
        yield heads, len(heads), matrices.head, columns
    elif unit == PARTS and matrices.parts:
        runs = tensor.view(-1, matrices.groups, sum(matrices.parts), columns)
        for view in runs.split(matrices.parts, dim=2):
            yield view, len(runs), matrices.groups * view.shape[2], columns
    else:
        stacked = tensor.view(-1, *tensor.shape[-2:])
        yield stacked, len(stacked), tensor.shape[-2], columns


def _like(
    views: Sequence[torch.Tensor], batch: torch.Tensor, counts: Sequence[int]
) -> list[torch.Tensor]:
    """The parts of a batch as views of the same shapes."""
    return [
        part.view(view.shape)
        for view, part in zip(views, batch.contiguous().split(counts))
    ]
