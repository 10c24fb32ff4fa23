"""Products of runs of rows: torch's grouped_mm, and one product a run, which is the reference."""

from unittest.mock import patch

import pytest
import torch

from megatron_ds.ops import grouped
from megatron_ds.ops.grouped import RowRuns
from tests.harness.aten_calls import Counted
from tests.harness.fake_cuda import FakeGpu, fake_cuda

pytestmark = pytest.mark.plan

COUNTS = {
    "some empty": (3, 0, 8, 1, 0),
    "one": (5,),
    "first and last empty": (0, 7, 0),
    "equal": (4, 4, 4, 4),
}


def tensors(counts, dtype, into=16, out=24):
    draw = torch.Generator().manual_seed(0)
    make = lambda *shape: torch.randn(*shape, generator=draw).to(dtype)
    return (
        make(sum(counts), into),
        make(len(counts), out, into),
        make(len(counts), out),
        make(sum(counts), out),
    )


def runs_of(counts):
    return RowRuns(counts, torch.tensor(counts))


def by_hand(counts):
    start = 0
    for run, count in enumerate(counts):
        yield run, slice(start, start + count)
        start += count


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", COUNTS)
def test_the_kernel_equals_one_product_a_run(name, dtype, monkeypatch):
    counts = COUNTS[name]
    x, weight, bias, dy = tensors(counts, dtype)
    runs, added = runs_of(counts), [torch.ones_like(weight), torch.ones_like(weight)]
    run = lambda: (
        grouped.grouped_affine(x, weight, bias, runs),
        grouped.grouped_affine(x, weight, None, runs),
        grouped.grouped_product(dy, weight, runs),
        grouped.new_grouped_gradient(weight, dy, x, runs),
        (out := added.pop(), grouped.add_grouped_gradient_(out, dy, x, runs))[0],
        (
            out := torch.full_like(weight, torch.nan),
            grouped.add_grouped_gradient_(out, dy, x, runs, overwrites=True),
        )[0],
    )
    loop = run()
    calls, kernel = [], torch.nn.functional.grouped_mm
    monkeypatch.setattr(grouped, "_has_kernel", lambda x, weight: x.shape[0] > 0)
    monkeypatch.setattr(
        grouped.F,
        "grouped_mm",
        lambda *args, **options: (calls.append(1), kernel(*args, **options))[1],
    )
    assert "ends" not in vars(runs)
    with Counted() as counted:
        results = run()
    for ours, expected in zip(results, loop, strict=True):
        assert ours.shape == expected.shape and ours.dtype == dtype
        # bf16: the bias, and what is there, are added after rounding
        tolerance = 1e-6 if dtype is torch.float32 else 2e-2
        torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)
    assert len(calls) == 6 and counted.calls["cumsum"] == 1
    assert not any(results[3][i].any() for i, count in enumerate(counts) if not count)


@pytest.mark.parametrize("name", COUNTS)
def test_one_product_a_run_is_the_product_of_its_rows(name):
    counts = COUNTS[name]
    x, weight, bias, dy = tensors(counts, torch.float64, into=5, out=3)
    runs = runs_of(counts)
    y, dx = (
        grouped.grouped_affine(x, weight, bias, runs),
        grouped.grouped_product(dy, weight, runs),
    )
    dw, sums = torch.ones_like(weight), grouped.sums_of_runs(dy, runs)
    grouped.add_grouped_gradient_(dw, dy, x, runs)
    written = torch.full_like(weight, torch.nan)
    grouped.add_grouped_gradient_(written, dy, x, runs, overwrites=True)
    new = grouped.new_grouped_gradient(weight, dy, x, runs)
    for run, rows in by_hand(counts):
        torch.testing.assert_close(y[rows], x[rows] @ weight[run].T + bias[run])
        torch.testing.assert_close(dx[rows], dy[rows] @ weight[run])
        torch.testing.assert_close(dw[run], 1 + dy[rows].T @ x[rows])
        torch.testing.assert_close(written[run], dy[rows].T @ x[rows])
        torch.testing.assert_close(new[run], dy[rows].T @ x[rows])
        torch.testing.assert_close(sums[run], dy[rows].sum(0))


def test_no_rows_at_all_have_no_results():
    x, weight, bias, dy = tensors((0, 0), torch.float32)
    runs = runs_of((0, 0))
    assert grouped.grouped_affine(x, weight, bias, runs).shape == (0, 24)
    assert grouped.grouped_product(dy, weight, runs).shape == (0, 16)
    assert not grouped.new_grouped_gradient(weight, dy, x, runs).any()
    assert not grouped.sums_of_runs(dy, runs).any()


@pytest.mark.parametrize(
    "capability, has_kernel",
    [
        ((8, 0), False),
        ((8, 9), False),
        ((9, 0), True),
        ((10, 3), True),
        ((12, 0), False),
    ],
)
def test_grouped_mm_runs_only_where_it_does_not_copy_to_the_host(
    capability, has_kernel
):
    """torch 2.13 has kernels for 9 and 10; elsewhere it reads `offs` on the host."""
    of_device = patch.object(
        torch.cuda, "get_device_capability", lambda device=None: capability
    )
    grouped._has_grouped_kernel.cache_clear()
    with fake_cuda(), FakeGpu(), of_device:
        x = torch.ones(8, 16, dtype=torch.bfloat16, device="cuda")
        weight = torch.ones(2, 24, 16, dtype=torch.bfloat16, device="cuda")
        assert grouped._has_kernel(x, weight) == has_kernel
    grouped._has_grouped_kernel.cache_clear()
