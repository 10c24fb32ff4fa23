"""The compiled SwiGLU against the formula in double precision, on odd sizes and at the ends of the range."""

import pytest
import torch

from megatron_ds.extensions.kernels.cpu import compiled_gated as module
from megatron_ds.host.fake_cpu import FakeCpu
from megatron_ds.ops.activation import swiglu

pytestmark = [
    pytest.mark.plan,
    pytest.mark.skipif(not module.extension(), reason="the extension is not built"),
]
dtypes = pytest.mark.parametrize("dtype", module.DTYPES)


def exact(x, dy):
    x = x.double().requires_grad_()
    gate, up = x.chunk(2, dim=-1)
    y = gate * torch.sigmoid(gate) * up
    return y.detach(), torch.autograd.grad(y, x, dy.double())[0]


def ours(x, dy):
    x = x.clone().requires_grad_()
    y = swiglu(x)
    assert y.grad_fn.name() == "_CompiledSwiGLUBackward"
    return y.detach(), torch.autograd.grad(y, x, dy)[0]


def numbers(rows, width, dtype):
    draw = torch.Generator().manual_seed(rows * width)
    x = 3 * torch.randn(rows, 2 * width, generator=draw)
    return x.to(dtype), torch.randn(rows, width, generator=draw).to(dtype)


@dtypes
@pytest.mark.parametrize(
    "rows, width", [(1, 1), (3, 31), (70, 1025), (2, 40_001)]
)  # parts of a vector, of a block; several chunks, and one that a row exceeds
def test_it_is_right_to_rounding_forward_and_backward(rows, width, dtype):
    x, dy = numbers(rows, width, dtype)
    rtol = 2e-6 if dtype is torch.float32 else 2**-8
    for got, expected in zip(ours(x, dy), exact(x, dy)):
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), expected, rtol=rtol, atol=1e-6)


@dtypes
def test_ends_of_the_range(dtype):
    inf, nan = float("inf"), float("nan")
    gate = torch.tensor([inf, 1e30, 100, 0.0, -100, -1e30, -inf, nan], dtype=dtype)
    x = torch.stack([gate, torch.ones_like(gate)], dim=1)
    y, dx = ours(x, torch.ones(8, 1, dtype=dtype))
    near = lambda got, wanted: torch.testing.assert_close(
        got, torch.tensor(wanted, dtype=dtype), equal_nan=True
    )
    near(y[:, 0], [inf, 1e30, 100, 0, 0, 0, 0, nan])
    near(dx[:, 0], [1, 1, 1, 0.5, 0, 0, 0, nan])
    near(dx[:, 1], [inf, 1e30, 100, 0, 0, 0, 0, nan])


@dtypes
def test_bits_depend_neither_on_threads_nor_on_other_rows(dtype, monkeypatch):
    x, dy = numbers(70, 1025, dtype)
    whole = ours(x, dy)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    for got, expected in zip(ours(x, dy), whole):
        assert torch.equal(got, expected)
    for got, expected in zip(ours(x[5:6], dy[5:6]), whole):
        assert torch.equal(got, expected[5:6])


def test_memory_order_and_dimensions_do_not_matter():
    x, dy = numbers(12, 8, torch.float32)
    whole = ours(x, dy)
    apart = ours(x.view(3, 4, 16), dy.t().contiguous().t().view(3, 4, 8))
    assert all(map(torch.equal, (t.view(12, -1) for t in apart), whole))
    turned = x.t().contiguous().t()
    assert torch.equal(swiglu(turned), whole[0])
    assert swiglu(x[:0]).shape == (0, 8)


def test_a_plan_computes_nothing():
    with FakeCpu():
        assert swiglu(torch.empty(3, 16)).shape == (3, 8)
