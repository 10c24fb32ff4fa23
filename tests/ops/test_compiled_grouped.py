"""Products of runs of rows in one compiled call against one product a run."""

import pytest
import torch

from megatron_ds.extensions.kernels.cpu import compiled_grouped, compiled_product
from megatron_ds.host.fake_cpu import FakeCpu
from megatron_ds.ops import grouped, widened_products
from megatron_ds.ops.grouped import RowRuns
from megatron_ds.ops.kernel_table import implementations_recorded, selected

pytestmark = pytest.mark.plan

COUNTS = {
    "alike": (70, 66, 70, 64, 65, 71, 66, 70),
    "some empty": (0, 130, 0, 3, 1, 90, 0),
    "one": (200,),
}
OUT, INTO = 67, 81


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def dtype(request, monkeypatch):
    """Of compiled products, which take small matrices, too."""
    if reason := compiled_product.reason_against(request.param):
        pytest.skip(reason)
    for least in (compiled_product.LEAST, compiled_product.LEAST_MULTIPLICATIONS):
        monkeypatch.setitem(least, request.param, 16)
    return request.param


def tensors(counts, dtype):
    draw = torch.Generator().manual_seed(sum(counts))
    make = lambda *shape: torch.randn(*shape, generator=draw).to(dtype)
    x, dy = make(sum(counts), INTO), make(sum(counts), OUT)
    return x, dy, make(len(counts), OUT, INTO), make(len(counts), OUT)


def results(x, dy, weight, bias, runs):
    """Of each operation; sums are added to ones in fp32."""
    added = torch.ones(weight.shape)
    written = torch.full(weight.shape, torch.nan)
    grouped.add_grouped_gradient_(added, dy, x, runs)
    grouped.add_grouped_gradient_(written, dy, x, runs, overwrites=True)
    return (
        grouped.grouped_affine(x, weight, None, runs),
        grouped.grouped_affine(x, weight, bias, runs),
        grouped.grouped_product(dy, weight, runs),
        grouped.new_grouped_gradient(weight, dy, x, runs),
        added,
        written,
    )


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("name", COUNTS)
def test_one_call_has_the_bits_of_one_product_a_run(name, threads, dtype, monkeypatch):
    counts = COUNTS[name]
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    arguments = (*tensors(counts, dtype), RowRuns(counts, torch.tensor(counts)))
    with implementations_recorded() as ran:
        ours = results(*arguments)
    names = ("grouped_affine", "grouped_product", "grouped_gradient")
    assert ran == {name: {"c++"} for name in names}
    monkeypatch.setattr(compiled_grouped, "suits", lambda *_: False)
    monkeypatch.setattr(compiled_product, "pays", lambda *_: True)
    one_a_run = results(*arguments)
    assert all(map(torch.equal, ours, one_a_run))


def test_what_it_does_not_take_goes_another_way(dtype, monkeypatch):
    counts = COUNTS["alike"]
    x, dy, weight, _ = tensors(counts, dtype)
    takes = lambda *factors: compiled_grouped.suits(weight, counts, *factors)
    assert takes(x, weight)
    assert not takes(x.t().contiguous().t(), weight)
    assert not takes(x.double(), weight.double())
    assert not takes(x, weight.double())
    assert not compiled_grouped.suits(weight, (0,) * 8, x[:0], weight)
    assert not compiled_grouped.suits(weight[:, :8], counts, x, weight)
    with selected("torch"), implementations_recorded() as ran:
        runs = RowRuns(counts, torch.tensor(counts))
        grouped.grouped_affine(x, weight, None, runs)
    assert ran == {"affine": {"torch"}}


def test_a_plan_counts_packed_factors_of_each_thread(dtype, monkeypatch):
    counts = COUNTS["alike"]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    with FakeCpu(), widened_products.WORKSPACE.apart() as workspace:
        x = torch.empty(sum(counts), INTO, dtype=dtype)
        weight = torch.empty(len(counts), OUT, INTO, dtype=dtype)
        runs = RowRuns(counts, torch.tensor(counts))
        assert grouped.grouped_affine(x, weight, None, runs).shape == (len(x), OUT)
        (packed,) = workspace.values()
    assert 4 * packed.numel() >= 2 * dtype.itemsize * (max(counts) + OUT) * INTO
