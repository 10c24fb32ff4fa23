"""Gradients of weights on a GPU: 16-bit products are added to fp32 sums without being rounded, if torch can.

torch has these products for GPUs alone. Operations of the CPU stand in for them, on a GPU that does not exist;
tests/gpu runs those of a GPU.
"""

from contextlib import contextmanager

import pytest
import torch

from megatron_ds.extensions.kernels.gpu import fp32_sums
from megatron_ds.ops import kernel_table
from megatron_ds.ops.grouped import RowRuns, add_grouped_gradient_
from megatron_ds.ops.product import FP32_SUMS, add_product_
from tests.harness.fake_cuda import FakeGpu, fake_cuda

pytestmark = pytest.mark.plan

COUNTS = (5, 0, 11)
ROWS, WIDTH, DEPTH = 24, 16, 32


@contextmanager
def torch_with_fp32_sums(rounds: bool = False):
    """A fake GPU whose torch takes `out_dtype`; yields the calls. rounds: it rounds products before it adds."""
    calls = []

    def product_of(a, b, dtype):
        made = a.float() @ b.float()
        return made.to(a.dtype).to(dtype) if rounds else made.to(dtype)

    def addmm(self, a, b, out_dtype, *, beta=1, alpha=1, out):
        assert self.data_ptr() == out.data_ptr() and (beta, alpha) == (1, 1)
        calls.append("addmm")
        return out.add_(product_of(a, b, out_dtype))

    def mm(a, b, out_dtype, *, out):
        calls.append("mm")
        return out.copy_(product_of(a, b, out_dtype))

    forget()
    with torch.library._scoped_library("aten", "IMPL") as stand_in:
        stand_in.impl("addmm.dtype_out", addmm, "CPU")
        stand_in.impl("mm.dtype_out", mm, "CPU")
        with fake_cuda(), FakeGpu():
            yield calls
    forget()


def forget():
    """Ask again which implementations a GPU has."""
    fp32_sums.reason_against.cache_clear()
    kernel_table._candidates.cache_clear()


def tensors(dtype):
    draw = torch.Generator().manual_seed(0)
    make = lambda *shape: torch.randn(*shape, generator=draw)
    dy, x = make(sum(COUNTS), ROWS), make(sum(COUNTS), WIDTH)
    sums = make(len(COUNTS), ROWS, WIDTH)
    return dy.to(dtype).to("cuda"), x.to(dtype).to("cuda"), sums.to("cuda")


def error_of(got, expected):
    return ((got.cpu().double() - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("overwrites", [False, True])
def test_products_of_layers_and_experts_are_added_without_rounding(dtype, overwrites):
    with torch_with_fp32_sums() as calls:
        dy, x, sums = tensors(dtype)
        runs = RowRuns(COUNTS, torch.tensor(COUNTS).to("cuda"))
        wide, wide_x = dy.cpu().double(), x.cpu().double()
        before = 0 if overwrites else sums.cpu().double()
        parts = zip(wide.split(COUNTS), wide_x.split(COUNTS))
        expected = before + torch.stack([a.t() @ b for a, b in parts])
        assert add_product_.has(FP32_SUMS, "cuda", torch.float32)
        calls.clear()
        # A layer's gradient, and those of three experts, of which one has no rows.
        one = sums[0].clone()
        whole = wide.t() @ wide_x + (0 if overwrites else one.cpu().double())
        add_product_(one, dy.t(), x, overwrites)
        add_grouped_gradient_(sums, dy, x, runs, overwrites)
        assert error_of(one, whole) < 1e-6 and error_of(sums, expected) < 1e-6
        assert calls == ["mm" if overwrites else "addmm"] * 3


def test_where_torch_rounds_the_product_is_added_by_itself(caplog):
    with torch_with_fp32_sums(rounds=True) as calls:
        dy, x, sums = tensors(torch.bfloat16)
        assert not add_product_.has(FP32_SUMS, "cuda", torch.float32)
        calls.clear()
        expected = sums[0].cpu().double() + dy.cpu().double().t() @ x.cpu().double()
        add_product_(sums[0], dy.t(), x)
        assert not calls and 1e-5 < error_of(sums[0], expected) < 1e-2
    assert "rounded to 16 bits before they are added" in caplog.text


def test_where_torch_refuses_the_dtypes_the_product_is_added_by_itself(caplog):
    """torch for CPUs has no such operation."""
    forget()
    with fake_cuda(), FakeGpu():
        dy, x, sums = tensors(torch.bfloat16)
        assert not add_product_.has(FP32_SUMS, "cuda", torch.float32)
        expected = sums[0].cpu().double() + dy.cpu().double().t() @ x.cpu().double()
        add_product_(sums[0], dy.t(), x)
        assert error_of(sums[0], expected) < 1e-2
    forget()
    assert "does not take out_dtype here" in caplog.text


def test_fp32_factors_are_torchs_own_product():
    with torch_with_fp32_sums() as calls:
        dy, x, sums = tensors(torch.float32)
        assert add_product_.has(FP32_SUMS, "cuda", torch.float32)
        calls.clear()
        add_product_(sums[0], dy.t(), x)
        assert not calls


def test_a_plan_has_no_16_bit_product_in_memory():
    out = torch.empty(ROWS, WIDTH, device="meta")
    a, b = (
        torch.empty(n, m, dtype=torch.bfloat16, device="meta")
        for n, m in ((ROWS, DEPTH), (DEPTH, WIDTH))
    )
    assert add_product_.choice(out, a, b) is fp32_sums.add_product_
    add_product_(out, a, b)
