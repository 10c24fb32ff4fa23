"""Rotary position embedding."""

import torch

from megatron_ds.extensions.kernels.gpu import rotary_kernels
from megatron_ds.ops.rotary import rotary_tables


def launch() -> None:
    """Packets of 16 bytes and single numbers, with a rest that is not rotated; more heads than threads."""
    for dtype, d, channels in ((torch.bfloat16, 48, 16), (torch.float32, 15, 6)):
        qkv = torch.ones(3, 2, 21, 4, d, dtype=dtype, requires_grad=True)
        cos, sin = rotary_tables(torch.arange(6).view(2, 3), channels)
        q, k, v = rotary_kernels.split_rotary(qkv, cos, sin)
        torch.autograd.backward(
            (rotary_kernels.rotary(q, cos, sin), k, v),
            (torch.ones_like(q), torch.ones_like(k), torch.ones_like(v)),
        )
