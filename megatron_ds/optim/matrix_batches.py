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
# A view, and the matrices, rows and columns that it holds.
Views = tuple[torch.Tensor, int, int, int]


def change_matrices(
    change: Callable[[torch.Tensor], torch.Tensor],
    unit: str,
    parameters: Sequence[tuple[torch.Tensor, Matrices]],
) -> None:
    """Replace all matrices of the parameters by those that `change` returns: [n, o, i] → [n, o, i].

    unit        what is a matrix of packed queries, keys and values: PARTS, HEADS or WHOLE
    parameters  (tensor, the matrices in it)
    """
    # Matrices of equal shape, with the number of them in each view.
    views_of_shape: dict[tuple[int, int], list[torch.Tensor]] = defaultdict(list)
    counts_of_shape: dict[tuple[int, int], list[int]] = defaultdict(list)
    for tensor, matrices in parameters:
        for view, count, rows, columns in views_of(tensor, matrices, unit):
            views_of_shape[rows, columns].append(view)
            counts_of_shape[rows, columns].append(count)
    # Each batch is filled, changed, and copied back.
    for shape, views in views_of_shape.items():
        counts = counts_of_shape[shape]
        batch = views[0].new_empty(sum(counts), *shape)
        parts = _like(views, batch, counts)
        torch._foreach_copy_(parts, views)
        changed = change(batch)
        parts = _like(views, changed, counts)
        torch._foreach_copy_(views, parts)


def views_of(tensor: torch.Tensor, matrices: Matrices, unit: str) -> Iterator[Views]:
    """Yield the matrices of one parameter [.., rows, columns], contiguous, as few views.

    The elements of a view are those of its matrices, one after the other, in order.
    """
    columns = tensor.shape[-1]
    if unit == HEADS and matrices.head is not None:
        rows = matrices.head
        heads = tensor.view(-1, rows, columns)
        yield heads, len(heads), rows, columns
    elif unit == PARTS and matrices.parts:
        rows_of_group = sum(matrices.parts)
        runs = tensor.view(-1, matrices.groups, rows_of_group, columns)
        for view in runs.split(matrices.parts, dim=2):
            rows = matrices.groups * view.shape[2]
            yield view, len(runs), rows, columns
    else:
        rows = tensor.shape[-2]
        stacked = tensor.view(-1, rows, columns)
        yield stacked, len(stacked), rows, columns


def _like(
    views: Sequence[torch.Tensor], batch: torch.Tensor, counts: Sequence[int]
) -> list[torch.Tensor]:
    """Return the parts of a batch as views of the same shapes."""
    parts = batch.contiguous().split(counts)
    return [part.view(view.shape) for view, part in zip(views, parts)]
