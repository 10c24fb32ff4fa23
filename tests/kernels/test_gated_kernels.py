"""SwiGLU and squared ReLU kernels against float64.

Tolerances: fp32 8e-7 of a result (expf to 2 units in the last place, and some six roundings), 16 bits one
unit in the last place, 2^-8 and 2^-11; and of the largest result 4e-7, because 1 + a (1 - σ) cancels near
a = -1.28, in torch's fp32, too; and the smallest normal number of the dtype.
"""

import pytest
import torch
import torch.nn.functional as F

from megatron_ds.extensions.kernels.gpu import gated_kernels
from megatron_ds.ops.activation import squared_relu, swiglu
from tests.harness.emulated import SEEDS, compile_together, emulated_gpu

TOLERANCE = {torch.float32: 8e-7, torch.bfloat16: 2**-8, torch.float16: 2**-11}
CANCELLATION = 4e-7
KERNELS = {
    "swiglu": (
        gated_kernels.swiglu,
        lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
    ),
    "squared_relu": (gated_kernels.squared_relu, lambda x: F.relu(x).square()),
}
SHAPES = [
    (1, 16),
    (7, 2 * 264),
    (3, 5, 2 * 33),
    (700, 2),
    (0, 32),
    (5, 0),
    (37, 2 * 1000),
]


def randn(*shape, dtype, seed=0):
    return (3 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).to(
        dtype
    )


def forward_and_backward(name, x, factor=None):
    """factor: of all gradients, None for random ones."""
    x = x.detach().requires_grad_()
    y = KERNELS[name][0](x)
    dy = (
        randn(*y.shape, dtype=x.dtype, seed=1)
        if factor is None
        else torch.full_like(y, factor)
    )
    y.backward(dy)
    return y.detach(), x.grad, dy


def expected(name, x, dy):
    wide = x.detach().double().requires_grad_()
    y = KERNELS[name][1](wide)
    y.backward(dy.double())
    return y.detach(), wide.grad


def assert_close(got, want, dtype):
    assert got.shape == want.shape and got.dtype == dtype
    if want.numel():
        allowed = (
            TOLERANCE[dtype] * want.abs()
            + CANCELLATION * want.abs().max()
            + torch.finfo(dtype).tiny
        )
        assert ((got.double() - want).abs() <= allowed).all()


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """All instantiations that the tests launch in one call of g++."""

    def run():
        for name in KERNELS:
            for dtype in TOLERANCE:
                for shape in SHAPES:
                    forward_and_backward(name, randn(*shape, dtype=dtype))
            for x in strided():
                forward_and_backward(name, x)

    compile_together(run)


def strided():
    """Copied before the launch, but the misaligned one."""
    base = randn(9, 6, 32, dtype=torch.bfloat16)
    return (
        base[::2],
        base.transpose(0, 1),
        base.flatten()[1 : 1 + 320].view(10, 32),
        base[:, :, ::2],
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", KERNELS)
def test_results_and_gradients_equal_float64(name, dtype, shape):
    x = randn(*shape, dtype=dtype)
    with emulated_gpu(seed=1) as gpu:
        y, dx, dy = forward_and_backward(name, x)
    assert len(gpu.launches) == (2 if x.numel() else 0)
    for got, want in zip((y, dx), expected(name, x, dy), strict=True):
        assert_close(got, want, dtype)


@pytest.mark.parametrize("name", KERNELS)
def test_other_strides_and_addresses_are_taken(name):
    for x in strided():
        with emulated_gpu():
            y, dx, dy = forward_and_backward(name, x)
        for got, want in zip((y, dx), expected(name, x, dy), strict=True):
            assert_close(got, want, x.dtype)


def test_the_gradient_may_be_expanded():
    x = randn(4, 32, dtype=torch.float32).requires_grad_()
    with emulated_gpu():
        gated_kernels.swiglu(x).sum().backward()
    assert_close(x.grad, expected("swiglu", x, torch.ones(4, 16))[1], x.dtype)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_numbers_of_every_size_give_what_torch_gives(name, dtype):
    """Saturated, infinite and undefined ones."""
    inf, most = float("inf"), torch.finfo(dtype).max
    gate = [
        0.0,
        -0.0,
        20.0,
        -20.0,
        80.0,
        -80.0,
        100.0,
        -100.0,
        most,
        -most,
        inf,
        float("nan"),
        1,
        2,
        3,
        4,
    ]
    x = torch.tensor([*gate, *[1.0] * 16], dtype=dtype).view(1, 32)
    with emulated_gpu():
        y, dx, dy = forward_and_backward(name, x, 4.0)
    for got, want in zip((y, dx), expected(name, x, dy), strict=True):
        want = want.to(dtype)
        assert torch.equal(got.isnan(), want.isnan()) and torch.equal(
            got.isinf(), want.isinf()
        )
        finite = want.isfinite()
        assert_close(got[finite], want[finite].double(), dtype)


@pytest.mark.parametrize("seed", SEEDS)
def test_results_depend_neither_on_the_order_of_threads_nor_on_their_number(
    seed, monkeypatch
):
    x = randn(37, 528, dtype=torch.bfloat16)
    for name in KERNELS:
        with emulated_gpu():
            one = forward_and_backward(name, x)
        monkeypatch.setattr(gated_kernels, "THREADS", 64)
        with emulated_gpu(seed):
            other = forward_and_backward(name, x)
        monkeypatch.undo()
        assert all(torch.equal(a, b) for a, b in zip(one, other))


@pytest.mark.parametrize("operation, width", [(swiglu, 16), (squared_relu, 32)])
def test_tensors_without_memory_keep_x_alone(operation, width):
    kept = []
    x = torch.empty(3, 2, 32, dtype=torch.bfloat16, device="meta").requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(t) or t, lambda t: t
    ):
        y = operation(x)
    assert y.shape == (3, 2, width) and [t.shape for t in kept] == [x.shape]
    assert kept[0].untyped_storage()._cdata == x.untyped_storage()._cdata
    y.backward(torch.empty_like(y))
    assert x.grad.shape == x.shape


def test_more_packets_than_a_kernel_counts_are_refused_with_a_reason():
    wide = torch.empty(2**31, 18, dtype=torch.bfloat16, device="meta")
    assert "packets" in gated_kernels.fits_gated(
        wide
    ) and "packets" in gated_kernels.fits_plain(wide)
    assert (
        gated_kernels.fits_gated(wide[: 2**20])
        == gated_kernels.fits_plain(wide[: 2**20])
        == ""
    )
