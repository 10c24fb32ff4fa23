"""Activations of feed-forward layers."""

import torch

from megatron_ds.extensions.kernels.gpu import gated_kernels


def launch() -> None:
    """Packets of 16 bytes and single numbers; a block in part, and several blocks."""
    for dtype, width in ((torch.bfloat16, 528), (torch.float32, 66)):
        for function in (gated_kernels.swiglu, gated_kernels.squared_relu):
            x = torch.ones(17, width, dtype=dtype, requires_grad=True)
            function(x).sum().backward()
