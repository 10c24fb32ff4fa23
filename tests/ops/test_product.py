"""16-bit products: through fp32 where the processor has none, with the same result but for the last
rounding."""

import pytest
import torch

from megatron_ds.extensions.kernels.cpu import compiled_addition, compiled_product
from megatron_ds.ops import product as module
from megatron_ds.ops import widened_products as products
from megatron_ds.ops.core_attention import attention, reference_attention
from megatron_ds.ops.product import add_product_, affine, product
from megatron_ds.ops.widened_products import Workspace
from tests.harness.alive_bytes import AliveBytes

pytestmark = pytest.mark.plan


def factors(dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(shape, generator=generator).to(dtype)
        for shape in ((7, 33), (33, 5), (5, 33), (5,))
    ]


@pytest.fixture(params=[True, False], ids=["widened", "native"])
def is_without(request, monkeypatch):
    monkeypatch.setattr(
        products,
        "has_products",
        lambda dtype: dtype == torch.float32 or not request.param,
    )
    return request.param


@pytest.mark.parametrize("part", [2, 3, 100])  # widened at a time
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_products_are_exact_but_for_one_rounding(dtype, part, is_without, monkeypatch):
    monkeypatch.setattr(products, "PART_ELEMENTS", 1)
    monkeypatch.setattr(products, "LEAST_PART", part)
    a, b, weight, bias = factors(dtype)
    half_ulp = torch.finfo(dtype).eps / 2
    for ours, exact in (
        (product(a, b), a.double() @ b.double()),
        (affine(a, weight, None), a.double() @ weight.double().t()),
        (affine(a, weight, bias), a.double() @ weight.double().t() + bias.double()),
    ):
        assert ours.dtype == dtype
        # 33 products are summed in fp32; where fp32 itself is the dtype, each of those sums rounds.
        slack = (
            33
            * torch.finfo(torch.float32).eps
            * (a.double().abs() @ b.double().abs()).max()
        )
        assert ((ours - exact).abs() <= 1.01 * half_ulp * exact.abs() + slack).all()


def test_a_processor_without_16_bit_products_multiplies_in_fp32(monkeypatch):
    a, *_ = factors(torch.bfloat16)
    monkeypatch.setattr(products, "has_products", lambda dtype: dtype == torch.float32)
    used = []
    mm = torch.mm
    monkeypatch.setattr(
        torch,
        "mm",
        lambda a, b, **options: (used.append(a.dtype), mm(a, b, **options))[1],
    )
    x = a.t().contiguous()  # 7 products are summed, of 33 rows
    assert torch.equal(product(x, a), mm(x.float(), a.float()).bfloat16()) and used == [
        torch.float32
    ]


@pytest.mark.parametrize("n, k, m", [(8192, 64, 256), (64, 256, 8192), (256, 8192, 64)])
def test_no_more_than_a_part_of_the_longest_dimension_is_held_in_fp32(
    n, k, m, monkeypatch
):
    monkeypatch.setattr(products, "has_products", lambda dtype: dtype == torch.float32)
    monkeypatch.setattr(products, "WORKSPACE", Workspace())
    a, b = torch.full((n, k), 2**-7).bfloat16(), torch.ones(k, m).bfloat16()
    gradient, rounded = torch.zeros(n, m), 2 * n * m
    held = 4 * sum(products.working_elements(n, k, m).values())
    assert held <= 4 * (
        n * k * m // max(n, k, m) + products.PART_ELEMENTS
    )  # what is not cut, and a part
    with AliveBytes(peak=True) as alive:
        out = product(a, b)
    assert rounded + held <= alive.peak < rounded + 1.1 * held
    with AliveBytes(peak=True) as alive:
        add_product_(gradient, a, b)
        product(a, b)
    assert alive.peak <= 1.1 * rounded  # the same memory serves again
    assert out.unique().tolist() == gradient.unique().tolist() == [k * 2**-7]


def test_widened_products_work_after_others_were_made_for_inference_or_with_gradients(
    monkeypatch,
):
    monkeypatch.setattr(products, "has_products", lambda dtype: dtype == torch.float32)
    monkeypatch.setattr(products, "WORKSPACE", Workspace())
    a, b, *_ = factors(torch.bfloat16)
    with torch.inference_mode():
        product(a, b)
    product(a.clone().requires_grad_(), b)
    out = product(a, b)
    assert (
        torch.equal(out, (a.float() @ b.float()).bfloat16()) and not out.requires_grad
    )


@pytest.mark.parametrize("part", [2, 100])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
def test_products_are_added_to_gradients_of_either_width(
    out_dtype, part, is_without, monkeypatch
):
    monkeypatch.setattr(products, "PART_ELEMENTS", 1)
    monkeypatch.setattr(products, "LEAST_PART", part)
    a, b, *_ = factors(torch.bfloat16)
    out = torch.linspace(-3, 3, 35).view(7, 5).to(out_dtype)
    expected = out.double() + a.double() @ b.double()
    add_product_(out, a, b)
    assert out.dtype == out_dtype
    # a rounded product, added and rounded
    torch.testing.assert_close(out.double(), expected, rtol=2**-7, atol=2**-6)
    add_product_(out.fill_(torch.nan), a, b, overwrites=True)
    torch.testing.assert_close(
        out.double(), a.double() @ b.double(), rtol=2**-7, atol=2**-6
    )


def test_gradients_in_fp32_take_widened_products_without_rounding(monkeypatch):
    monkeypatch.setattr(products, "has_products", lambda dtype: dtype == torch.float32)
    a, b, *_ = factors(torch.bfloat16)
    out = torch.zeros(7, 5)
    add_product_(out, a, b)
    torch.testing.assert_close(
        out.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("sq", [1, 5, 130])
def test_attention_in_16_bits_is_that_of_fp32_rounded_where_there_are_no_products(
    sq, monkeypatch
):
    monkeypatch.setattr(products, "has_products", lambda dtype: dtype == torch.float32)
    generator = torch.Generator().manual_seed(sq)
    q, k, v = (
        torch.randn(s, 2, heads, 16, generator=generator).bfloat16()
        for s, heads in ((sq, 4), (130, 2), (130, 2))
    )
    out = attention(q, k, v)
    assert out.dtype == torch.bfloat16
    exact = reference_attention(q.double(), k.double(), v.double())
    assert ((out - exact).abs() <= 2**-8 * exact.abs() + 1e-5).all()


@pytest.mark.skipif(
    bool(compiled_product.reason_against_rows()),
    reason="not compiled for this processor",
)
@pytest.mark.parametrize(
    "columns, length", [(1, 1), (7, 31), (16, 32), (25, 70), (130, 384), (2500, 1100)]
)
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_single_row_is_rounded_once_and_alike_on_any_number_of_threads(
    columns, length, has_bias
):
    generator = torch.Generator().manual_seed(columns)
    x, wide, bias = (
        torch.randn(shape, generator=generator).bfloat16()
        for shape in ((1, length), (columns, length + 3), (columns,))
    )
    weight, bias = wide[:, 1:-2], bias if has_bias else None  # unaligned rows
    assert affine.choice(x, weight, bias) is not affine.in_torch
    exact = x.double() @ weight.double().t() + (bias.double() if has_bias else 0)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(affine(x, weight, bias))
    finally:
        torch.set_num_threads(before)
    error = (results[0] - exact).abs()
    assert (error <= 2**-8 * exact.abs() + 1e-5 * length**0.5).all()
    assert all(torch.equal(results[0], other) for other in results)
    out = torch.full((1, columns), torch.nan, dtype=torch.bfloat16)
    assert affine(x, weight, bias, out) is out and torch.equal(out, results[0])


@pytest.mark.parametrize("overwrites", [False, True])
def test_a_large_product_is_added_to_a_wider_tensor_in_parts(overwrites, monkeypatch):
    monkeypatch.setattr(module, "MOST_NARROW", 7000)
    monkeypatch.setattr(compiled_product, "suits", lambda a, b: False)
    monkeypatch.setattr(products, "has_products", lambda dtype: True)
    a, b = (
        torch.randn(*shape, generator=torch.Generator().manual_seed(1)).bfloat16()
        for shape in ((300, 20), (20, 100))
    )
    out = torch.ones(300, 100)
    expected = (1 - overwrites) + a.mm(b).float()
    with AliveBytes(peak=True) as alive:
        add_product_(out, a, b, overwrites)
    torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-2)
    assert (
        alive.peak <= (3 if overwrites or compiled_addition.extension() else 6) * 7000
    )
