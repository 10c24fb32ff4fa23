"""LayerNorm and RMSNorm."""

from unittest import mock

import torch

from megatron_ds.extensions.kernels.gpu import norm_kernels


def launch() -> None:
    """Rows of a warp, of several warps, and looped ones; five rows in two chunks."""
    with mock.patch.object(norm_kernels, "chunks_of", lambda threads: 2):
        for cols, most in ((8, 32), (1032, 32), (1032, 0)):
            with mock.patch.multiple(
                norm_kernels,
                FORWARD_NUMBERS=most,
                BACKWARD_NUMBERS=dict.fromkeys(norm_kernels.BACKWARD_NUMBERS, most),
            ):
                forget_ways()
                x, weight, bias = (
                    torch.ones(shape, requires_grad=True)
                    for shape in ((5, cols), (cols,), (cols,))
                )
                sum(
                    t.sum()
                    for t in norm_kernels.residual_norm(x, x, weight, bias, 1e-5)
                ).backward()
    forget_ways()


def forget_ways() -> None:
    """They are kept by shape, for the limits that held then."""
    norm_kernels._way_forward.cache_clear()
    norm_kernels._way_backward.cache_clear()
