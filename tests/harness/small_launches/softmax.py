"""Softmax of attention scores."""

import torch

from megatron_ds.extensions.kernels.gpu.softmax_kernels import (
    TableDropout,
    masked_softmax,
)


def launch() -> None:
    """Rows of a warp, with warps that have none, and of a block; packets and single numbers; dropout."""
    dropout = TableDropout(torch.arange(2), 40000, 3)
    for cols, table in ((40, None), (37, dropout), (1056, dropout), (16388, None)):
        queries = 5 if cols < 10000 else 1
        scores = torch.randn(2, 1, queries, cols, requires_grad=True)
        mask = (torch.arange(queries * cols) % 3 == 0).view(1, 1, queries, cols)
        masked_softmax(scores, mask, True, 0.5, table).sum().backward()
