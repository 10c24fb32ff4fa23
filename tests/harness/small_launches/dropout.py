"""Dropout, dropout before a sum, and masks of attention probabilities."""

import torch

from megatron_ds.extensions.kernels.gpu import dropout_kernels


def launch() -> None:
    """Packets and single elements, rows of a part of a warp and of several, picked rows and columns."""
    picked = torch.tensor([[4, 0, 2], [1, 1, 3]])
    for cols in (5, 24, 1032):
        x, residual = (torch.randn(3, 2, cols, requires_grad=True) for _ in range(2))
        table = {"seeds": (1, 2**63 - 1), "threshold": 40000, "first_row": 6}
        dropout_kernels.dropout(x, residual, **table).sum().backward()
        dropout_kernels.dropout(x, None, **table, picked=picked).sum().backward()
    seeds = torch.tensor([[1, 2, 3], [4, 5, 6]])
    for cols in (5, 1040):
        table = {"threshold": 40000, "first_row": 6, "cols": cols}
        dropout_kernels.fill_keep_masks_(
            torch.empty(2, 3, 3, cols, dtype=torch.bool), seeds, **table
        )
        dropout_kernels.fill_keep_masks_(
            torch.empty(2, 3, 3, 3, dtype=torch.bool), seeds, **table, picked=picked
        )
