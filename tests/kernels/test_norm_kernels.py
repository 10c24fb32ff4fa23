"""LayerNorm and RMSNorm kernels against float64."""

import pytest
import torch

from megatron_ds.ops.gpu import norm_kernels
from tests.harness.emulated import emulated_gpu


@pytest.mark.parametrize("cols", [8, 264, 1000])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-6), (torch.bfloat16, 8e-3)], ids=str)
def test_rms_norm_equals_float64(cols, dtype, tolerance):
    torch.manual_seed(0)
    x = torch.randn(7, cols).to(dtype).requires_grad_()
    weight = torch.randn(cols).to(dtype).requires_grad_()
    dy = torch.randn(7, cols).to(dtype)
    with emulated_gpu(seed=3) as gpu:
        y = norm_kernels.rms_norm(x, weight, 1e-5)
        y.backward(dy)
    assert len(gpu.launches) == 2
    wide, wide_weight = (t.detach().double().requires_grad_() for t in (x, weight))
    expected = torch.nn.functional.rms_norm(wide, (cols,), wide_weight, 1e-5)
    expected.backward(dy.double())
    for got, want in ((y, expected), (x.grad, wide.grad), (weight.grad, wide_weight.grad)):
        assert (got.double() - want).abs().max() <= tolerance * want.abs().max()
