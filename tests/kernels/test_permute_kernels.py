"""Kernels that move rows of tokens to their experts and add up the results, against torch's operations.

Sums over slots, and products of rows and weights, must have the bits of torch's. Gradients of weights are
sums over a row of up to 2056 products in fp32, in another order: 4e-6 of the sum of the products' sizes, for
some 20 roundings of 2^-24 in a row of additions.
"""

import pytest
import torch

from megatron_ds.extensions.kernels.gpu import permute_kernels as kernels
from megatron_ds.ops import permute as ops
from megatron_ds.ops.kernel_table import FLOATS, OPERATIONS
from tests.harness.emulated import SEEDS, compile_together, emulated_gpu

ROUNDINGS = 4e-6
WIDTHS = (1, 7, 24, 250, 520, 2056)
CASES = {
    "all kept": (1, 1, 0),
    "seven tokens": (7, 3, 0),
    "padded": (13, 2, 5),
}  # T, k, padding


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def table(tokens, k, padding, kept=0.7, seed=0):
    """Random (slots, place [tokens, k]). kept: share of slots with a row; padding: rows without a slot."""
    draw = torch.Generator().manual_seed(seed)
    slots = torch.randperm(tokens * k, generator=draw)
    slots = slots[torch.rand(tokens * k, generator=draw) < kept]
    mixed = torch.randperm(len(slots) + padding, generator=draw)
    slots = torch.cat((slots, slots.new_full((padding,), -1)))[mixed]
    place = torch.full((tokens * k + 1,), -1)
    place[slots] = torch.arange(len(slots))
    return slots, place[:-1].view(tokens, k)


def cycle(module, x, weights, slots, place, k, *, padded):
    """(rows, sums, gradients of x, rows and weights); module: of operations in torch, or of kernels."""
    x, weights = (t.detach().requires_grad_() for t in (x, weights))
    function = lambda name: (
        getattr(kernels, name.removesuffix("_padded"))
        if module is kernels
        else OPERATIONS[name].in_torch
    )
    end = "_padded" if padded else ""
    rows = function(f"permute{end}")(x, slots, place, *([] if padded else [k]))
    rows.retain_grad()
    y = function(f"combine{end}")(rows, weights, slots, place)
    y.backward(randn(*y.shape, dtype=y.dtype, seed=5))
    return rows.detach(), y.detach(), x.grad, rows.grad, weights.grad


def assert_equal(got, want, x, weights, k, slots):
    """All but the gradients of the weights to the bit."""
    *got, dweights = got
    *want, dweights_wanted = want
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)
    slope, there = randn(*got[1].shape, dtype=x.dtype, seed=5), slots[slots >= 0]
    sizes = torch.zeros(weights.numel())
    sizes[there] = (slope.abs().float() * x.abs().float()).sum(1)[there // k]
    assert dweights.dtype == torch.float32 and dweights.shape == weights.shape
    assert ((dweights - dweights_wanted).abs().flatten() <= ROUNDINGS * sizes).all()


def inputs(case, width, dtype):
    tokens, k, padding = CASES[case]
    return (
        randn(tokens, width, dtype=dtype),
        randn(tokens, k, seed=1),
        *table(tokens, k, padding),
        k,
    )


def strided():
    """[6, 40]: not contiguous, at an odd address, every other column."""
    base = randn(7, 2, 40, dtype=torch.bfloat16)
    return (
        base[1:, 0],
        base.flatten()[1 : 1 + 6 * 40].view(6, 40),
        base[:6, 1].repeat(1, 2)[:, ::2],
    )


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """All instantiations that the tests launch in one call of g++."""

    def run():
        for dtype in FLOATS:
            for width in WIDTHS:
                cycle(kernels, *inputs("padded", width, dtype), padded=True)
        for x in strided():
            cycle(kernels, x, randn(6, 2), *table(6, 2, 0), 2, padded=False)

    compile_together(run)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_rows_sums_and_gradients_are_torchs(case, dtype, width):
    x, weights, slots, place, k = given = inputs(case, width, dtype)
    padded = CASES[case][2] > 0
    with emulated_gpu(seed=1) as gpu:
        got = cycle(kernels, *given, padded=padded)
    assert len(gpu.launches) == 4
    assert_equal(got, cycle(ops, *given, padded=padded), x, weights, k, slots)


@pytest.mark.parametrize("tokens, kept, used", [(0, 1.0, 2), (5, 0.0, 2), (5, 0.0, 0)])
def test_no_tokens_and_no_rows(tokens, kept, used):
    slots, place = table(tokens, 2, 0, kept)
    given = randn(tokens, 24), randn(tokens, 2), slots, place[:, :used], 2
    with emulated_gpu():
        got = cycle(kernels, *given, padded=False)
    for a, b in zip(got, cycle(ops, *given, padded=False), strict=True):
        assert a.shape == b.shape and torch.equal(a, b) and not a.any()


def test_slots_behind_those_in_use_have_no_rows():
    slots = torch.tensor([7, 0, 4, 3, 8])  # slots 0, 1 of 3 of four tokens
    slots = slots[slots % 3 < 2]
    place = torch.full((12,), -1)
    place[slots] = torch.arange(len(slots))
    given = randn(4, 40), randn(4, 3, seed=1), slots, place.view(4, 3)[:, :2], 3
    with emulated_gpu():
        got = cycle(kernels, *given, padded=False)
    assert_equal(got, cycle(ops, *given, padded=False), given[0], given[1], 3, slots)


def test_rows_without_a_slot_reach_nothing():
    """Whatever they hold."""
    slots, place = torch.tensor([-1, 1, -1, 0]), torch.tensor([[3], [1]])
    rows = randn(4, 24)
    rows[0], rows[2] = float("nan"), float("inf")
    rows, weights = rows.requires_grad_(), randn(2, 1).requires_grad_()
    with emulated_gpu():
        y = kernels.combine(rows, weights, slots, place)
        y.sum().backward()
    assert torch.equal(y, rows[[3, 1]] * weights) and weights.grad.isfinite().all()
    assert not rows.grad[[0, 2]].any() and rows.grad[[1, 3]].all()


def test_other_strides_and_addresses_are_taken():
    slots, place = table(6, 2, 0)
    weights = randn(6, 2).t().contiguous().t()
    for x in strided():
        with emulated_gpu():
            got = cycle(kernels, x, weights, slots, place, 2, padded=False)
        assert_equal(
            got,
            cycle(ops, x, weights, slots, place, 2, padded=False),
            x,
            weights,
            2,
            slots,
        )


def test_the_gradient_may_be_expanded():
    order = torch.tensor([2, 0, 1])
    x = randn(3, 40).requires_grad_()
    with emulated_gpu():
        y = kernels.reorder(x, order, order.argsort())
        (grad,) = torch.autograd.grad(y, x, torch.arange(3.0)[:, None].expand(3, 40))
    assert torch.equal(y, x[order]) and torch.equal(
        grad[order], torch.arange(3.0)[:, None].expand(3, 40)
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_results_depend_neither_on_the_order_of_threads_nor_on_their_number(
    seed, monkeypatch
):
    given = inputs("padded", 520, torch.bfloat16)
    with emulated_gpu():
        one = cycle(kernels, *given, padded=True)
    monkeypatch.setattr(kernels, "THREADS", 64)
    with emulated_gpu(seed):
        other = cycle(kernels, *given, padded=True)
    assert all(torch.equal(a, b) for a, b in zip(one, other))


def test_tensors_without_memory_keep_the_place_of_rows_and_what_is_weighted():
    kept = []
    x = torch.empty(5, 32, dtype=torch.bfloat16, device="meta").requires_grad_()
    weights = torch.empty(5, 2, device="meta").requires_grad_()
    slots, place = (
        torch.empty(shape, dtype=torch.int64, device="meta")
        for shape in ((10,), (5, 2))
    )
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(t) or t, lambda t: t
    ):
        rows = ops.permute(x, slots, place, 2)
        assert [t is place for t in kept] == [True]
        y = ops.combine(rows, weights, slots, place)
    assert rows.shape == (10, 32) and y.shape == (5, 32) and len(kept) == 5
    y.backward(torch.empty_like(y))
    assert x.grad.shape == x.shape and weights.grad.shape == weights.shape


def test_what_a_kernel_does_not_count_is_refused_with_a_reason():
    slots, place = (
        torch.empty(shape, dtype=torch.int64, device="meta")
        for shape in ((2**20,), (2**19, 2))
    )
    wide, narrow = (
        torch.empty(2**20, h, dtype=torch.bfloat16, device="meta")
        for h in (2**15 - 1, 2**12)
    )
    weights = torch.empty(2**19, 2, device="meta")
    assert "packets" in kernels.fits_permute(wide, slots, place)
    assert "packets" in kernels.fits_combine(wide, weights, slots, place)
    assert "packets" in kernels.fits_reorder(wide, slots, slots)
    assert "weights of torch.float64" in kernels.fits_combine(
        narrow, weights.double(), slots, place
    )
    assert "slots" in kernels.fits_permute(narrow[:, :1], slots, place, 2**11)
    assert (
        kernels.fits_permute(narrow, slots, place)
        == kernels.fits_combine(narrow, weights, slots, place)
        == kernels.fits_reorder(narrow, slots, slots)
        == ""
    )


@pytest.mark.parametrize("module", [ops, kernels], ids=["torch", "cuda"])
@pytest.mark.parametrize("padded", [False, True])
def test_a_slot_without_a_row_reads_nothing_even_beside_infinity(module, padded):
    """Row 0 is infinite, and so is the weight of the missing slot."""
    slots, place = torch.tensor([0, 2]), torch.tensor([[0, -1], [1, -1]])
    x = torch.tensor([[torch.inf] * 4, [1.0, 2.0, 3.0, 4.0]])
    weights = torch.tensor([[0.5, torch.inf], [0.25, torch.nan]])
    with emulated_gpu(seed=1):
        combine = kernels.combine
        permute = kernels.permute
        if module is not kernels:
            suffix = "_padded" if padded else ""
            combine = OPERATIONS[f"combine{suffix}"].in_torch
            permute = OPERATIONS[f"permute{suffix}"].in_torch
        y = combine(x, weights, slots, place)
        leaf = torch.zeros(2, 4, requires_grad=True)
        permute(leaf, slots, place, *([] if padded else [2])).backward(x)
    assert torch.equal(y, torch.stack((x[0], x[1] / 4)))
    assert torch.equal(leaf.grad, x)
