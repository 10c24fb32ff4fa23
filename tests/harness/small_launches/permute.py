"""Rows of tokens for their experts."""

import torch

from megatron_ds.extensions.kernels.gpu import permute_kernels


def launch() -> None:
    """Packets of 16 bytes and single numbers; rows of a part of a warp, of a warp and of several; padding."""
    slots, place = (
        torch.tensor([5, 0, -1, 3, 1]),
        torch.tensor([[1, 4], [-1, 3], [-1, 0]]),
    )
    for dtype, width in (
        (torch.bfloat16, 528),
        (torch.bfloat16, 1048),
        (torch.float32, 33),
    ):
        x = torch.ones(3, width, dtype=dtype, requires_grad=True)
        weights = torch.ones(3, 2, requires_grad=True)
        rows = permute_kernels.reorder(
            permute_kernels.permute(x, slots, place), torch.arange(5), torch.arange(5)
        )
        permute_kernels.combine(rows, weights, slots, place).sum().backward()
