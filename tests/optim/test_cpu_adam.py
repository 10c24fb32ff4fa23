"""The compiled CPU Adam against the plain reference beside it, to the last bit, and against torch's own
AdamW.

Where the extension was not compiled only the reference and the way around it are tested.
"""

import logging
import multiprocessing
import sys
import threading

import pytest
import torch

from megatron_ds.config import OptimizerConfig
from megatron_ds.extensions.kernels.cpu import compiled_adam as adam
from megatron_ds.extensions.kernels.cpu.compiled_adam import adamw_
from megatron_ds.host.large_pages import huge_page_zeros
from megatron_ds.ops import kernel_table
from megatron_ds.ops.adam import adamw, reference_adamw_
from megatron_ds.ops.update_rows import UNCORRECTED, AdamRow, AdamStep
from megatron_ds.optim import OPTIMIZERS
from megatron_ds.optim.row_adamw import RowAdamW

pytestmark = pytest.mark.plan

compiled = pytest.mark.skipif(
    adam.extension() is None, reason="the extension was not compiled"
)
SETTINGS = OptimizerConfig(adam_beta2=0.95)
HYPER = dict(lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
SIZES = (
    1,
    7,
    15,
    31,
    32,
    33,
    100,
    70_001,
)  # below, at and beyond one round of vectors; more than one chunk
VARIANTS = ("avx512", "avx2", "scalar")


@pytest.fixture(params=VARIANTS)
def variant(request):
    if request.param not in adam.variants():
        pytest.skip(f"this processor has no {request.param}")
    return request.param


def randn(n, seed):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def rows(dtype=None, sizes=SIZES, seed=0):
    """Fresh tensors in the middle of a training: moments are not zero, steps differ."""
    return [
        AdamRow(
            randn(n, seed + i),
            randn(n, seed + i + 100),
            randn(n, seed + i + 200) * 0.1,
            randn(n, seed + i + 300) ** 2,
            step=i + 1,
            low=None if dtype is None else torch.zeros(n, dtype=dtype),
        )
        for i, n in enumerate(sizes)
    ]


def bits(row):
    tensors = [row.p, row.m, row.v, row.grad] + ([] if row.low is None else [row.low])
    return [
        t.view(torch.int16 if t.element_size() == 2 else torch.int32) for t in tensors
    ]


def assert_same_bits(a, b):
    for x, y in zip(a, b, strict=True):
        assert all(torch.equal(s, t) for s, t in zip(bits(x), bits(y), strict=True)), (
            f"{x.p.numel()} elements"
        )


@compiled
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16], ids=str)
def test_every_variant_has_the_bits_of_the_reference(variant, dtype):
    fast, plain = rows(dtype), rows(dtype)
    adamw_(fast, **HYPER, grad_scale=1 / 3, threads=1, variant=variant)
    reference_adamw_(plain, **HYPER, grad_scale=1 / 3)
    assert_same_bits(fast, plain)


@compiled
def test_moments_are_used_as_they_are_at_the_step_uncorrected(variant):
    fast, plain = (
        [r._replace(step=UNCORRECTED) for r in rows(torch.bfloat16)] for _ in range(2)
    )
    first = [r.p.clone() for r in plain]
    adamw_(fast, **HYPER, variant=variant)
    reference_adamw_(plain, **HYPER)
    assert_same_bits(fast, plain)
    for r, p in zip(plain, first):  # of the moments after the update
        expected = p * (1 - 3e-4) - 3e-3 * r.m / (r.v.sqrt() + 1e-8)
        torch.testing.assert_close(r.p, expected, rtol=1e-5, atol=1e-6)


@compiled
def test_the_number_of_threads_changes_no_bit():
    one, many = (
        rows(torch.bfloat16, (300_001, 5, 400_000)),
        rows(torch.bfloat16, (300_001, 5, 400_000)),
    )
    adamw_(one, **HYPER, threads=1)
    adamw_(many, **HYPER, threads=5)
    assert_same_bits(one, many)


@compiled
def test_cutting_a_buffer_anywhere_changes_no_bit(variant):
    (whole,) = rows(torch.bfloat16, (1000,))
    (parts,) = rows(torch.bfloat16, (1000,))
    cuts = (0, 1, 64, 100, 333, 960, 1000)
    cut = [
        AdamRow(
            *(t[a:b] for t in (parts.p, parts.grad, parts.m, parts.v)),
            1,
            parts.low[a:b],
        )
        for a, b in zip(cuts, cuts[1:])
    ]
    adamw_([whole], **HYPER, variant=variant)
    adamw_(cut, **HYPER, variant=variant)
    assert_same_bits([whole], [parts])


def every_16_bit_pattern_and_its_neighbours():
    """All fp32 numbers whose first 16 bits are anything and whose last ones are a tie of bf16 or fp16, or
    next to one."""
    tails = torch.tensor(
        [0, 1, 0xFFF, 0x1000, 0x1001, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xF000, 0xFFFF],
        dtype=torch.int64,
    )
    patterns = (torch.arange(1 << 16)[:, None] << 16) + tails
    return (
        torch.where(patterns < 1 << 31, patterns, patterns - (1 << 32))
        .to(torch.int32)
        .flatten()
        .view(torch.float32)
    )


@compiled
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "unaligned"])
def test_the_16_bit_weight_is_rounded_as_torch_casts(variant, dtype, offset):
    p = every_16_bit_pattern_and_its_neighbours()
    zero = torch.zeros_like(p)
    low = torch.zeros(p.numel() + 1, dtype=dtype)[offset : offset + p.numel()]
    # Zero gradient and no decay leave p alone, except for the payload of a NaN.
    adamw_(
        [AdamRow(p.clone(), zero, zero.clone(), zero.clone(), 1, low)],
        **HYPER | {"weight_decay": 0.0},
        variant=variant,
    )
    numbers = ~p.isnan()
    assert torch.equal(
        low[numbers].view(torch.int16), p[numbers].to(dtype).view(torch.int16)
    )
    assert low[~numbers].isnan().all()


@compiled
def test_twenty_steps_stay_within_1e_6_of_torch_adamw():
    ours, theirs = (
        torch.nn.Parameter(randn(5000, 0)),
        torch.nn.Parameter(randn(5000, 0)),
    )
    mine, torchs = (
        RowAdamW([ours], **HYPER),
        torch.optim.AdamW([theirs], fused=True, **HYPER),
    )
    for step in range(20):
        ours.grad, theirs.grad = randn(5000, step + 1) * 4, randn(5000, step + 1) * 4
        mine.grad_scale = torchs.grad_scale = torch.tensor(4.0)
        mine.step()
        torchs.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


@compiled
def test_a_run_goes_on_from_torchs_state_and_torch_from_ours():
    def three_steps(p, optimizer):
        for step in range(3):
            p.grad = randn(p.numel(), step + 1)
            optimizer.step()
        return p.detach().clone()

    def resumed(first, second):
        p = torch.nn.Parameter(randn(333, 0))
        optimizer = first([p], **HYPER)
        three_steps(p, optimizer)
        other = second([p], **HYPER)
        other.load_state_dict(optimizer.state_dict())
        return three_steps(p, other)

    straight = resumed(torch.optim.AdamW, torch.optim.AdamW)
    for first, second in ((torch.optim.AdamW, RowAdamW), (RowAdamW, torch.optim.AdamW)):
        torch.testing.assert_close(
            resumed(first, second), straight, rtol=1e-6, atol=1e-6
        )


@compiled
def test_parameters_without_gradient_are_left_alone():
    p, q = torch.nn.Parameter(randn(9, 0)), torch.nn.Parameter(randn(9, 1))
    p.grad = randn(9, 2)
    optimizer = RowAdamW([p, q], **HYPER)
    optimizer.step()
    assert (
        torch.equal(q, randn(9, 1))
        and q not in optimizer.state
        and not torch.equal(p, randn(9, 0))
    )


@compiled
def test_callers_on_several_threads_do_not_disturb_each_other():
    """Ranks of the test harness are threads, and the pool is one."""
    work = [rows(sizes=(300_000, 70_001), seed=i) for i in range(4)]
    expected = [rows(sizes=(300_000, 70_001), seed=i) for i in range(4)]
    threads = [
        threading.Thread(target=adamw_, args=(w,), kwargs=HYPER | {"threads": 3})
        for w in work
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for w, e in zip(work, expected):
        reference_adamw_(e, **HYPER)
        assert_same_bits(w, e)


def _update_in_child(connection):
    torch.set_num_threads(1)  # OpenMP's own threads, unlike ours, do not survive a fork
    (row,) = rows(sizes=(200_000,))
    adamw_([row], **HYPER, threads=3)
    connection.send(
        row.p.tolist()
    )  # a sum would depend on how many threads torch sums with


@compiled
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_has_threads_of_its_own():
    (row,) = rows(sizes=(200_000,))
    adamw_([row], **HYPER, threads=3)  # the pool exists before the fork
    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(
        target=_update_in_child, args=(there,)
    )
    child.start()
    assert here.poll(30), "the child waits for threads that it does not have"
    assert here.recv() == row.p.tolist()
    child.join()


@compiled
@pytest.mark.parametrize(
    "change, message",
    [
        (dict(grad=torch.zeros(9)), "beside a parameter of 10"),
        (dict(m=torch.zeros(20)[::2]), "not contiguous"),
        (dict(v=torch.zeros(10, dtype=torch.float64)), "float64"),
        (dict(low=torch.zeros(10)), "float32"),
        (dict(step=0), "step 0"),
    ],
)
def test_tensors_that_do_not_fit_are_errors(change, message):
    good = dict(
        p=torch.zeros(10),
        grad=torch.zeros(10),
        m=torch.zeros(10),
        v=torch.zeros(10),
        step=1,
    )
    with pytest.raises(ValueError, match=message):
        adamw_([AdamRow(**good | change)], **HYPER)


@compiled
def test_an_unknown_variant_and_a_broken_table_are_errors():
    with pytest.raises(ValueError, match="no variant 'sse9'"):
        adamw_(rows(), **HYPER, variant="sse9")
    numbers = dict(
        lr=0.1,
        beta1=0.9,
        beta2=0.9,
        eps=1e-8,
        weight_decay=0.0,
        grad_scale=1.0,
        threads=1,
        variant="",
    )
    for table in (torch.zeros(1, 7), torch.zeros(1, 8), torch.ones(8)):
        with pytest.raises(ValueError):
            adam.extension().adamw(table.long().numpy(), **numbers)


def test_zeros_on_huge_pages_are_zeros():
    for numel, dtype in (
        (0, torch.float32),
        (7, torch.bfloat16),
        (3_000_001, torch.float32),
    ):
        zeros = huge_page_zeros(numel, dtype=dtype)
        assert zeros.dtype == dtype and zeros.shape == (numel,) and not zeros.any()
        zeros += 1  # and can be written to the last one


@compiled
def test_empty_and_no_tensors_are_no_work():
    adamw_([], **HYPER)
    alone, beside = rows(sizes=(5,)), [*rows(sizes=(5,)), *rows(sizes=(0,))]
    before = bits(rows(sizes=(5,))[0])
    adamw_(alone, **HYPER)
    adamw_(beside, **HYPER)
    assert all(
        torch.equal(a, b) for a, b in zip(bits(alone[0]), bits(beside[0]), strict=True)
    )
    assert not torch.equal(bits(alone[0])[0], before[0]) and beside[1].p.numel() == 0


def test_without_the_extension_torchs_adamw_serves_and_says_so_once(
    monkeypatch, caplog
):
    monkeypatch.setitem(
        sys.modules, "megatron_ds._cpu_adam", None
    )  # importing it is an ImportError then
    adam.extension.cache_clear(), kernel_table._candidates.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            groups = lambda: [{"params": [torch.nn.Parameter(torch.ones(3))]}]
            first, second = (OPTIMIZERS["adam"](groups(), SETTINGS) for _ in range(2))
            assert (
                type(first) is type(second) is torch.optim.AdamW
                and adam.variants() == []
            )
            assert huge_page_zeros(2_000_000).count_nonzero() == 0
    finally:
        adam.extension.cache_clear(), kernel_table._candidates.cache_clear()
    (said,) = [r.message for r in caplog.records if "CPU Adam" in r.message]
    assert "torch's operations run instead" in said and "C++17 compiler" in said


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_reference_is_torchs_adamw_and_a_cast(dtype):
    (row,) = rows(dtype, (501,))
    p = torch.nn.Parameter(row.p.clone())
    optimizer = torch.optim.AdamW([p], foreach=False, **HYPER)
    p.grad = row.grad / 5
    optimizer.state[p] = {
        "step": torch.tensor(0.0),
        "exp_avg": row.m.clone(),
        "exp_avg_sq": row.v.clone(),
    }
    optimizer.step()
    reference_adamw_([row], **HYPER, grad_scale=1 / 5)
    torch.testing.assert_close(row.p, p.detach(), rtol=1e-6, atol=1e-6)
    assert torch.equal(row.low, row.p.to(dtype))


@compiled
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradients_of_16_bits_give_what_their_fp32_copies_give(dtype):
    made = [rows(dtype), rows(dtype), rows(dtype)]
    low = [
        [r._replace(grad=r.grad.to(dtype)) if i % 2 else r for i, r in enumerate(each)]
        for each in made
    ]
    how = AdamStep(**HYPER, divisor=3.0)
    adamw(low[0][0].grad, low[0], how)
    adamw.in_torch(low[1][0].grad, low[1], how)
    adamw_(
        [r._replace(grad=r.grad.float()) for r in low[2]],
        **HYPER,
        grad_scale=how.grad_scale,
    )
    assert_same_bits(low[0], low[1])
    assert_same_bits(
        [r._replace(grad=r.p) for r in low[0]], [r._replace(grad=r.p) for r in low[2]]
    )
