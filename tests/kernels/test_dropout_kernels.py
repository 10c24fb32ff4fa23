"""Dropout and masks of csrc/gpu/dropout.cu against the operations on a CPU, whose random numbers NumPy draws.

Equal means equal bits: both round the same product, and then the same sum, to nearest.
"""

from unittest.mock import patch

import numpy as np
import pytest
import torch

from megatron_ds.extensions.kernels.gpu import dropout_kernels, site_seeds
from megatron_ds.ops.dropout import (
    KeepMask,
    dropout,
    dropout_add,
    fill_attention_mask_,
    sample_keys,
)
from megatron_ds.ops.keep_tables import LEVELS, threshold_of
from megatron_ds.ops.keyed_random import seed_of
from tests.harness.emulated import SEEDS, compile_together, emulated_gpu
from tests.harness.host_blocks import gpu_path, own_blocks

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BITS = {
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
}
SHAPES = [
    (1, 1, 1),
    (7, 3, 40),
    (5, 2, 33),
    (3, 1, 16),
    (2, 2, 1000),
    (1, 66, 24),
    (2, 1, 8200),
]
KERNELS = {
    operation: next(i.function for i in operation.implementations if i.name == "cuda")
    for operation in (dropout, dropout_add, fill_attention_mask_)
}


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """All instantiations, in one call of g++."""

    def launched():
        for dtype in DTYPES:
            for h in (8, 5):
                for operation in (dropout, dropout_add):
                    run(KERNELS[operation], operation, *tensors((2, 2, h), dtype))
        for cols in (16, 24, 12, 10, 5):
            mask_by_kernel(
                KeepMask(0.5, sample_keys(1, "a", (0,)), range(1), range(1), cols)
            )
        for cols in (16, 1030):
            mask_by_kernel(
                KeepMask(
                    0.5,
                    sample_keys(1, "a", (0,)),
                    range(1),
                    range(1),
                    cols,
                    torch.zeros(1, 1, dtype=torch.int64),
                )
            )

    compile_together(launched)


def tensors(shape, dtype, seed=0):
    """x, residual, dy"""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(3)]


def run(function, operation, x, residual, dy, p=0.3, first=0, picked=None):
    """[y, dx] of dropout, [y, dx, d residual] of dropout_add; by an implementation of the operation."""
    s, b, _ = x.shape
    x, residual = (t.detach().requires_grad_() for t in (x, residual))
    length = s if picked is None else 40
    inputs = [x] if operation is dropout else [x, residual]
    y = function(
        *inputs,
        p,
        seed=9,
        site="here",
        sample_ids=tuple(range(5, 5 + b)),
        rows=range(first, first + length),
        picked=picked,
    )
    return [y.detach(), *torch.autograd.grad(y, inputs, dy)]


def assert_equal_bits(got, expected):
    assert len(got) == len(expected)
    for a, b in zip(got, expected):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert torch.equal(
            a.contiguous().view(BITS[a.dtype]), b.contiguous().view(BITS[b.dtype])
        )


def assert_same_as_on_cpu(operation, *arguments, seed=0, **named):
    expected = run(operation, operation, *arguments, **named)
    with emulated_gpu(seed) as gpu:
        got = run(KERNELS[operation], operation, *arguments, **named)
    assert_equal_bits(got, expected)
    return gpu.launches


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    "operation", [dropout, dropout_add], ids=lambda operation: operation.name
)
def test_values_and_gradients_have_the_bits_of_the_cpu(operation, shape, dtype):
    for seed, p, first in zip(SEEDS, (0.1, 0.5, 0.9), (0, 3, 1 << 40)):
        launches = assert_same_as_on_cpu(
            operation, *tensors(shape, dtype), seed=seed, p=p, first=first
        )
        assert len(launches) == 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_memory_is_taken(dtype):
    x, residual, dy = tensors((6, 3, 48), dtype)
    one_further = lambda t: torch.cat((t.new_zeros(1), t.flatten()))[1:].view(t.shape)
    strided = lambda t: t.transpose(0, 1).contiguous().transpose(0, 1)
    for move in (one_further, strided, lambda t: t[:1].expand_as(t)):
        for operation in (dropout, dropout_add):
            assert_same_as_on_cpu(operation, move(x), residual, dy)
            assert_same_as_on_cpu(operation, x, move(residual), move(dy))


@pytest.mark.parametrize("shape", [(0, 2, 16), (3, 0, 16), (3, 2, 0)], ids=str)
def test_nothing_is_launched_for_nothing(shape):
    with emulated_gpu() as gpu:
        y, dx, _ = run(
            KERNELS[dropout_add], dropout_add, *tensors(shape, torch.float32)
        )
    assert y.shape == dx.shape == shape
    assert not gpu.launches or shape[2] == 0  # blocks that do nothing


@pytest.mark.parametrize(
    "operation", [dropout, dropout_add], ids=lambda operation: operation.name
)
def test_picked_positions_have_the_rows_of_the_whole_table(operation):
    picked = torch.tensor([[39, 0, 7, 7, 12], [3, 4, 5, 38, 1]])
    arguments = tensors((5, 2, 33), torch.bfloat16)
    assert_same_as_on_cpu(operation, *arguments, first=11, picked=picked)
    assert_same_as_on_cpu(
        operation, *arguments, first=11, picked=picked.t().contiguous().t()
    )
    assert_same_as_on_cpu(
        operation, *arguments, first=11, picked=picked[:1].expand(2, -1)
    )


def test_a_probability_that_drops_nothing_keeps_all():
    arguments = tensors((3, 2, 40), torch.float32)
    assert threshold_of(1e-6) == LEVELS
    assert_same_as_on_cpu(dropout_add, *arguments, p=1e-6)
    with emulated_gpu() as gpu:
        assert_equal_bits(
            run(KERNELS[dropout], dropout, *arguments, p=0.0)[:1], arguments[:1]
        )
        run(KERNELS[dropout_add], dropout_add, *arguments, p=0.0)
    assert not gpu.launches


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("p", [0.1, 0.9])
def test_the_largest_and_the_smallest_numbers_round_as_in_torch(dtype, p):
    x, residual, dy = tensors((5, 2, 40), torch.float32)
    limits = torch.finfo(dtype)
    small = [(t * limits.smallest_normal / 8).to(dtype) for t in (x, residual, dy)]
    large = [(t.clamp(-1, 1).double() * limits.max).to(dtype) for t in (x, -x, dy)]
    for seed, arguments in enumerate((small, large)):
        assert_same_as_on_cpu(dropout, *arguments, p=p, seed=seed)
        assert_same_as_on_cpu(dropout_add, *arguments, p=p, seed=seed)


def test_a_dropped_infinity_is_no_number_as_in_torch():
    x, residual, dy = tensors((3, 2, 40), torch.float32)
    x[:, :, ::3] = torch.inf
    expected = run(dropout, dropout, x, residual, dy)[0]
    with emulated_gpu():
        got = run(KERNELS[dropout], dropout, x, residual, dy)[0]
    assert expected.isnan().any() and expected.isinf().any()
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


def test_results_do_not_depend_on_the_launch(monkeypatch):
    arguments = tensors((7, 2, 1000), torch.bfloat16)
    for blocks, threads in ((1, 32), (2, 64), (3, 512)):
        monkeypatch.setattr(dropout_kernels, "MOST_BLOCKS", blocks)
        monkeypatch.setattr(dropout_kernels, "MOST_THREADS", threads)
        monkeypatch.setattr(dropout_kernels, "PICKED_THREADS", threads)
        assert_same_as_on_cpu(dropout_add, *arguments, seed=blocks)
        check_mask(1030, picked=False)
        check_mask(1030, picked=True)


def test_backward_keeps_nothing_but_picked_positions():
    kept = []
    with (
        emulated_gpu(),
        torch.autograd.graph.saved_tensors_hooks(
            lambda t: kept.append(t) or t, lambda t: t
        ),
    ):
        x, residual, _ = (
            t.requires_grad_() for t in tensors((5, 2, 40), torch.float32)
        )
        table = {"seed": 1, "site": "a", "sample_ids": (0, 1), "rows": range(40)}
        KERNELS[dropout_add](x, residual, 0.3, **(table | {"rows": range(5)}))
        assert not kept
        picked = torch.tensor([[39, 0, 7, 7, 12], [3, 4, 5, 38, 1]])
        KERNELS[dropout_add](x, residual, 0.3, **table, picked=picked)
    assert [t.data_ptr() for t in kept] == [picked.data_ptr()]


def test_the_gradient_has_a_gradient():
    x, residual, dy = tensors((5, 2, 40), torch.float32)

    def of_gradient(function):
        leaf, wanted = x.clone().requires_grad_(), dy.clone().requires_grad_()
        y = function(leaf, 0.3, seed=1, site="a", sample_ids=(0, 1), rows=range(5))
        (dx,) = torch.autograd.grad(y, leaf, wanted, create_graph=True)
        return torch.autograd.grad(dx, wanted, residual)

    with emulated_gpu():
        got = of_gradient(KERNELS[dropout])
    assert_equal_bits(got, of_gradient(dropout))


def test_without_memory_results_are_made_and_nothing_is_launched():
    x, residual = (
        torch.empty(5, 2, 40, dtype=torch.bfloat16, device="meta", requires_grad=True)
        for _ in range(2)
    )
    y = dropout_add(
        x, residual, 0.3, seed=1, site="a", sample_ids=(0, 1), rows=range(5)
    )
    y.backward(torch.empty_like(y))
    assert (
        y.shape == x.grad.shape == residual.grad.shape
        and y.dtype == x.grad.dtype == x.dtype
    )
    keep = KeepMask(
        0.3, sample_keys(1, "a", (0, 1)), range(3), range(4), 5, device="meta"
    )
    assert keep.mask.shape == (2, 3, 4, 5) and keep.mask.dtype == torch.bool


def mask_by_kernel(keep):
    """The mask that the kernel draws, in memory of no defined values before."""
    sq, sk = (
        (len(keep.rows), keep.cols)
        if keep.picked is None
        else 2 * keep.picked.shape[1:]
    )
    out = torch.full(
        (len(keep.keys), len(keep.heads), sq, sk), 7, dtype=torch.uint8
    ).view(torch.bool)
    KERNELS[fill_attention_mask_](
        out, keep.p, keep.of_heads, keep.rows, keep.cols, keep.picked
    )
    return out


def check_mask(cols, *, picked, seed=0, p=0.4, first=5):
    samples, rows = (4, 9), range(first, first + cols)
    index = (
        torch.stack(
            [
                torch.randperm(cols, generator=torch.Generator().manual_seed(i))[:7]
                for i in range(2)
            ]
        )
        if picked
        else None
    )
    rows = rows if picked else rows[:6]
    keep = KeepMask(p, sample_keys(3, "layer", samples), range(2, 5), rows, cols, index)
    with emulated_gpu(seed) as gpu:
        got = mask_by_kernel(keep)
    assert torch.equal(got.view(torch.uint8), keep.mask.view(torch.uint8))
    assert len(gpu.launches) == 1


@pytest.mark.parametrize("cols", [1, 5, 10, 12, 16, 24, 33, 130, 1000, 8208])
def test_masks_have_the_bits_of_the_cpu(cols):
    for seed, p in zip(SEEDS, (0.1, 0.5, 1e-6)):
        check_mask(cols, picked=False, seed=seed, p=p, first=seed << 33)


@pytest.mark.parametrize("cols", [7, 33, 1000, 1030])
def test_masks_of_picked_tokens_have_the_bits_of_the_cpu(cols):
    for seed, p in zip(SEEDS, (0.1, 0.5, 0.9)):
        check_mask(cols, picked=True, seed=seed, p=p)


def test_masks_that_the_kernel_does_not_take_are_named():
    fit = dropout_kernels.masks_fit
    assert fit(torch.empty(2, 3, 4, 5), 5, None) == ""
    assert "65536 samples" in fit(torch.empty(1 << 8, 1 << 8, 1, 0), 5, None)
    assert "columns" in fit(torch.empty(1, 1, 2, 2), 1 << 18, torch.zeros(1, 2))
    assert "contiguous" in fit(torch.empty(2, 3, 5, 4).transpose(2, 3), 5, None)


def test_the_order_of_numbers_in_words_is_numpys():
    """Sixteen numbers a counter, the lowest bits of the first word first, on processors of any byte order."""
    words = np.random.Philox(key=seed_of(3, "layer", 4, 2), counter=5).random_raw(4)
    numbers = [
        int(word) >> shift & 0xFFFF for word in words for shift in (0, 16, 32, 48)
    ]
    keep = KeepMask(0.5, sample_keys(3, "layer", (4,)), range(2, 3), range(5, 6), 16)
    with emulated_gpu():
        got = mask_by_kernel(keep)
    assert got.flatten().tolist() == [number < threshold_of(0.5) for number in numbers]


def test_a_launch_that_is_repeated_draws_the_masks_of_the_seeds_in_memory():
    """A CUDA graph repeats a launch with the same addresses, after other seeds were copied there."""
    x, _, _ = tensors((5, 2, 40), torch.float32)
    seeds = torch.tensor([seed_of(1, "a", sample) for sample in (0, 1)])
    launch = lambda: dropout_kernels.dropout(
        x, None, seeds=seeds, threshold=threshold_of(0.3), first_row=0
    )
    with emulated_gpu():
        launch()
        seeds.copy_(torch.tensor([seed_of(1, "a", sample) for sample in (6, 7)]))
        again = launch()
    expected = dropout(x, 0.3, seed=1, site="a", sample_ids=(6, 7), rows=range(5))
    assert torch.equal(again, expected)


def test_seeds_of_a_micro_batch_are_copied_once_for_all_places():
    seeds = site_seeds.SiteSeeds()
    cpu = torch.device("cpu")
    sites = ["embedding", "layers.0", "layers.1"]
    for site in sites:  # the first micro-batch finds the places
        seeds.on(cpu, 3, site, (4, 7))
    with patch.object(site_seeds, "seeds_on", wraps=site_seeds.seeds_on) as copies:
        for samples in ((8, 9), (10, 11)):
            for site in sites:
                found = seeds.on(cpu, 3, site, samples)
                assert found.tolist() == [seed_of(3, site, n) for n in samples]
    assert copies.call_count == 2


def test_a_step_copies_seeds_once_for_each_micro_batch():
    with gpu_path():
        run = own_blocks("gpt, dropout", 3, more="--kernels auto")
        run()
        with patch.object(site_seeds, "seeds_on", wraps=site_seeds.seeds_on) as copies:
            run()  # the same samples
    assert copies.call_count == 0
