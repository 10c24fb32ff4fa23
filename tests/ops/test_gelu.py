"""The compiled GELU against the formula in double precision, on odd sizes and at the ends of the range."""

import logging
import subprocess
import sys

import pytest
import torch

from megatron_ds.extensions.kernels.cpu import compiled_gelu as module
from megatron_ds.ops import kernel_table
from megatron_ds.ops.activation import gelu
from tests.harness.limits import HUNG
from tests.harness.warm import warm_python

pytestmark = pytest.mark.plan

compiled = pytest.mark.skipif(
    not module.extension(), reason="the extension is not built"
)


def exact(x, dy):
    """In the form without cancellation: (1 + tanh u) / 2 = sigmoid(2 u)."""
    x = x.double().requires_grad_()
    y = x * torch.sigmoid(2 * (2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))
    return y.detach(), torch.autograd.grad(y, x, dy.double())[0]


def ours(x, dy):
    x = x.clone().requires_grad_()
    y = gelu(x)
    return y.detach(), torch.autograd.grad(y, x, dy)[0]


def numbers(count, dtype):
    generator = torch.Generator().manual_seed(count)
    return [
        (scale * torch.randn(count, generator=generator)).to(dtype) for scale in (3, 1)
    ]


@compiled
@pytest.mark.parametrize(
    "count", [1, 7, 1023, 1025, 70_001]
)  # parts of a vector, a block, a chunk
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_gelu_is_right_to_rounding_forward_and_backward(count, dtype):
    x, dy = numbers(count, dtype)
    tolerance = (
        dict(rtol=2e-6, atol=1e-6)
        if dtype is torch.float32
        else dict(rtol=2**-8, atol=1e-6)
    )
    for got, expected in zip(ours(x, dy), exact(x, dy)):
        assert (
            got.dtype == dtype
            and gelu(x.requires_grad_()).grad_fn.name() == "_CompiledGELUBackward"
        )
        torch.testing.assert_close(got.double(), expected, **tolerance)


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ends_of_the_range(dtype):
    inf, nan = float("inf"), float("nan")
    x = torch.tensor(
        [inf, 1e30, 100, 16, 0.0, -0.0, 1e-40, -100, -1e30, -inf, nan], dtype=dtype
    )
    y, dx = ours(x, torch.ones_like(x))
    torch.testing.assert_close(
        y,
        torch.tensor([inf, 1e30, 100, 16, 0, 0, 0, 0, 0, 0, nan], dtype=dtype),
        equal_nan=True,
    )
    torch.testing.assert_close(
        dx,
        torch.tensor([1, 1, 1, 1, 0.5, 0.5, 0.5, 0, 0, 0, nan], dtype=dtype),
        equal_nan=True,
    )


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_depend_neither_on_threads_nor_on_where_an_element_lies(
    dtype, monkeypatch
):
    x, dy = numbers(70_001, dtype)
    whole = ours(x, dy)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    for got, expected in zip(ours(x, dy), whole):
        assert torch.equal(got, expected)
    for start in (0, 1, 5, 31):
        for stop in (
            start + 1,
            start + 7,
            start + 31,
            start + 32,
            start + 33,
            start + 65,
        ):
            for got, expected in zip(ours(x[start:stop], dy[start:stop]), whole):
                assert torch.equal(got, expected[start:stop])


def every_bf16(sign):
    """All finite numbers of a sign in random order, so that neighbours differ."""
    bits = torch.randperm(0x7F80, generator=torch.Generator().manual_seed(1))
    return sign * bits.to(torch.int16).view(torch.bfloat16)


@compiled
@pytest.mark.parametrize("sign", [1, -1])
def test_every_bf16_number(sign):
    """Within rounding and 2e-5 of the exact result, which is 0 to every digit that matters below 1e-34:
    the loops for any processor keep exponentials above 2^-126."""
    x = every_bf16(sign)
    near, far = x[x.abs() < 1e4], x.abs() >= 1e4
    for got, expected in zip(
        ours(near, torch.ones_like(near)), exact(near, torch.ones_like(near))
    ):
        torch.testing.assert_close(
            got.double(), expected, rtol=2**-8 + 2e-5, atol=1e-34
        )
    y, dx = ours(x[far], torch.ones_like(x[far]))
    torch.testing.assert_close(
        y, x[far] if sign > 0 else torch.zeros_like(y), rtol=0, atol=1e-34
    )
    torch.testing.assert_close(dx, torch.full_like(dx, sign > 0), rtol=0, atol=1e-34)


@compiled
def test_memory_order_does_not_matter():
    x, _ = numbers(35, torch.float32)
    x = x.view(5, 7).t().requires_grad_()
    dy = torch.ones(()).expand(7, 5)
    y, dx = ours(x.detach(), dy)
    torch.testing.assert_close(y, gelu.in_torch(x.detach()))
    torch.testing.assert_close(dx, torch.autograd.grad(gelu.in_torch(x), x, dy)[0])


FORKED = """
import os, torch
from megatron_ds.extensions.kernels.cpu.compiled_gelu import extension
torch.set_num_threads(2)
x, y = torch.ones(300_000), torch.zeros(300_000)
torch.mm(torch.ones(900, 900), torch.ones(900, 900))          # starts torch's team
compiled = extension()
if (child := os.fork()) == 0:
    compiled.forward(x.data_ptr(), y.data_ptr(), x.numel(), False, 2)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


@compiled
def test_a_forked_child_does_not_wait_for_the_threads_of_its_parents_team():
    subprocess.run([warm_python(), "-c", FORKED], check=True, timeout=HUNG)


def test_without_the_extension_torch_serves_and_that_is_said_once(monkeypatch, caplog):
    monkeypatch.setitem(
        sys.modules, "megatron_ds._gelu", None
    )  # importing it is an ImportError then
    module.extension.cache_clear(), kernel_table._candidates.cache_clear()
    x, _ = numbers(9, torch.float32)
    try:
        with caplog.at_level(logging.WARNING):
            assert torch.equal(gelu(x), gelu.in_torch(x)) and torch.equal(
                gelu(x), gelu.in_torch(x)
            )
        assert caplog.text.count("GELU is not compiled") == 1
    finally:
        module.extension.cache_clear(), kernel_table._candidates.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_other_dtypes_are_torchs(dtype):
    x, _ = numbers(9, dtype)
    assert torch.equal(gelu(x), gelu.in_torch(x))
