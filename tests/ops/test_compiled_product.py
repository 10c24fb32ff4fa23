"""Compiled products of fp32 and bf16 matrices against products in double precision."""

import pytest
import torch

from megatron_ds.extensions.kernels.cpu import compiled_product as module
from megatron_ds.host.fake_cpu import FakeCpu
from megatron_ds.ops import widened_products
from megatron_ds.ops.kernel_table import selected
from megatron_ds.ops.product import add_product_, affine, product, product_into

pytestmark = pytest.mark.plan

compiled = pytest.mark.skipif(
    bool(module.reason_against(torch.bfloat16)),
    reason=module.reason_against(torch.bfloat16) or "-",
)
HALF_ULP = {
    torch.float32: 2**-24,
    torch.bfloat16: 2**-8,
}  # relative error of a rounding
SUMS = 3e-6  # error of sums in fp32, relative to the sum of absolute values


def draw(*shape, seed=0, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def dtype(request, monkeypatch):
    """Of compiled products, which take small matrices, too."""
    if reason := module.reason_against(request.param):
        pytest.skip(reason)
    for least in (module.LEAST, module.LEAST_MULTIPLICATIONS):
        monkeypatch.setitem(least, request.param, 64)
    return request.param


@pytest.fixture
def calls(monkeypatch):
    """Sizes of the compiled products that are computed."""
    made, run = [], module._run
    monkeypatch.setattr(
        module,
        "_run",
        lambda function, out, a, b, *bias: (
            made.append((*a.shape, b.shape[1])),
            run(function, out, a, b, *bias),
        ),
    )
    return made


def assert_rounded(ours, a, b, bias=0.0):
    """`ours` is the exact product, rounded once."""
    exact = a.double() @ b.double() + bias
    size = a.double().abs() @ b.double().abs()
    assert ours.dtype == a.dtype
    assert (
        (ours - exact).abs() <= 1.01 * HALF_ULP[a.dtype] * exact.abs() + SUMS * size
    ).all()


@pytest.mark.parametrize(
    "is_flipped",
    [(False, False), (True, False), (False, True), (True, True)],
    ids=["rows", "columns of a", "columns of b", "columns"],
)
@pytest.mark.parametrize(
    "n, k, m",
    [(64, 64, 64), (67, 99, 81), (1033, 70, 97), (72, 2059, 65), (65, 66, 1601)],
)
def test_products_are_exact_but_for_one_rounding(n, k, m, is_flipped, dtype, calls):
    a = draw(k, n, dtype=dtype).t() if is_flipped[0] else draw(n, k, dtype=dtype)
    b = (
        draw(m, k, seed=1, dtype=dtype).t()
        if is_flipped[1]
        else draw(k, m, seed=1, dtype=dtype)
    )
    bias = draw(m, seed=2, dtype=dtype)
    assert_rounded(product(a, b), a, b)
    assert_rounded(affine(a, b.t(), bias), a, b, bias.double())
    into = torch.full((n + 1, m + 3), 7.0, dtype=dtype)
    product_into(into[:n, :m], a, b)
    assert (
        torch.equal(into[:n, :m], product(a, b))
        and (into[n:] == 7).all()
        and (into[:, m:] == 7).all()
    )
    affine(a, b.t(), bias, into[:n, :m])
    assert torch.equal(into[:n, :m], affine(a, b.t(), bias))
    sums = torch.randn(n, m)
    exact = sums.double() + a.double() @ b.double()
    add_product_(sums, a, b)  # not rounded to bf16
    limits = SUMS * (a.double().abs() @ b.double().abs() + exact.abs())
    assert ((sums - exact).abs() <= limits).all()
    written = torch.full((n, m), torch.nan)
    add_product_(written, a, b, overwrites=True)
    assert ((written - a.double() @ b.double()).abs() <= limits).all()
    assert calls == [(n, k, m)] * 8


def test_parts_of_larger_matrices_are_read_and_written_where_they_are(dtype, calls):
    large, wide = draw(150, 200, dtype=dtype), draw(130, 300, seed=1, dtype=dtype)
    into = torch.zeros(90, 200)
    a, b = large[3:80, 5:135], wide[:, 7:90]
    assert_rounded(product(a, b), a, b)
    add_product_(into[5:82, 9:92], a, b)
    expected = torch.zeros(90, 200)
    expected[5:82, 9:92] = a.float() @ b.float()
    assert (into - expected).abs().max() < 1e-4 and len(calls) == 2


def test_bits_depend_neither_on_threads_nor_on_other_rows_and_columns(
    dtype, monkeypatch
):
    x, weight = draw(400, 1100, dtype=dtype), draw(330, 1100, seed=1, dtype=dtype)
    bias = draw(330, seed=2, dtype=dtype)
    results = []
    for threads in (1, 2, 5):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=threads: count)
        sums = torch.ones(330, 400)
        add_product_(sums, weight, x.t())
        results.append((affine(x, weight, bias), sums))
    for result in results[1:]:
        assert all(map(torch.equal, result, results[0]))
    assert torch.equal(
        affine(x[70:170], weight[30:130], bias[30:130]), results[0][0][70:170, 30:130]
    )


def test_infinite_and_undefined_numbers_show_in_their_row_and_column(dtype):
    a, b = draw(80, 64, dtype=dtype), draw(64, 70, seed=1, dtype=dtype)
    a[3, 5], b[7, 11] = torch.nan, torch.inf
    is_finite = product(a, b).isfinite()
    assert (
        not is_finite[3].any()
        and not is_finite[:, 11].any()
        and is_finite.sum() == 79 * 69
    )


def test_a_gradient_sees_that_its_tensor_was_changed(dtype):
    sums, a = torch.zeros(64, 64, requires_grad=True), draw(64, 64, dtype=dtype)
    changed = sums * 1
    squares = changed.square().sum()
    with torch.no_grad():
        add_product_(changed, a, a)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares.backward()


@compiled
@pytest.mark.parametrize(
    "a, b",
    [
        (draw(63, 64), draw(64, 64)),
        (draw(64, 63), draw(63, 64)),
        (draw(64, 128)[:, ::2], draw(64, 64)),
        (draw(64, 64).half(), draw(64, 64).half()),
        (draw(64, 64).float(), draw(64, 64).float()),
        (draw(127, 1024).float(), draw(1024, 1024).float()),
    ],
)
def test_what_it_does_not_take_goes_another_way(a, b, calls):
    assert (
        product(a, b).double() - a.double() @ b.double()
    ).abs().max() < 0.3 and not calls


@compiled
def test_it_can_be_switched_off(calls, monkeypatch):
    a = draw(64, 64)
    with selected("torch"):
        product(a, a)
    monkeypatch.setattr(
        widened_products, "has_products", lambda dtype: dtype == torch.float32
    )
    product(a, a)
    assert not calls


def test_a_plan_counts_its_result_and_its_workspace(dtype, calls):
    with FakeCpu(), widened_products.WORKSPACE.apart() as workspace:
        a = torch.empty(96, 64, dtype=dtype)
        assert product(a, a.t()).shape == (96, 96) and calls
        (packed,) = workspace.values()
    assert 4 * packed.numel() >= 2 * dtype.itemsize * 96 * 64


def test_large_products_in_fp32_are_compiled_and_others_are_not(calls):
    if reason := module.reason_against(torch.float32):
        pytest.skip(reason)
    a, b = draw(128, 256).float(), draw(256, 129).float()
    product(a, b[:, 1:])
    add_product_(torch.zeros(128, 128), a, b[:, 1:])
    product(a, b[:, 2:])
    affine(a[1:], b[:, 1:].t(), None)
    add_product_(torch.zeros(128, 128), a[:, 1:], b[1:, 1:])
    assert calls == [(128, 256, 128)] * 2


def test_a_processor_without_its_instructions_or_with_faster_libraries_does_without(
    monkeypatch,
):
    class Fake:
        has_products, has_tiles, is_amd = (staticmethod(lambda: True) for _ in range(3))

    low, wide = torch.bfloat16, torch.float32
    monkeypatch.setattr(module, "extension", lambda: Fake)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    assert module.reason_against(low) == "AMX is faster" and not module.reason_against(
        wide
    )
    Fake.is_amd, Fake.has_tiles = (staticmethod(lambda: False) for _ in range(2))
    assert module.reason_against(
        wide
    ) == "MKL is made for this processor" and not module.reason_against(low)
    assert not module.reason_against(wide, low)
    Fake.is_amd = staticmethod(lambda: True)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    assert module.reason_against(wide) == "torch multiplies without MKL"
    Fake.has_products = staticmethod(lambda: False)
    assert (
        module.reason_against(low)
        == module.reason_against(wide, low)
        == "no AVX-512 BF16"
    )
    monkeypatch.setattr(module, "extension", lambda: None)
    assert module.reason_against(wide) == "not compiled"
