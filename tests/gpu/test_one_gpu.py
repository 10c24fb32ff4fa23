"""One GPU: training there follows training on the CPU: all dtypes, offload, loss scaling, experts."""

import pytest
import torch

from megatron_ds.extensions.kernels.gpu import fp32_sums
from megatron_ds.ops.core_attention import attention
from megatron_ds.ops.grouped import RowRuns, add_grouped_gradient_
from megatron_ds.ops.product import FP32_SUMS, add_product_
from megatron_ds.training.pretrain import deterministic_operations
from tests.harness.gpu_equality import CASES, LIMITS, STEPS, check, train
from tests.harness.layout_comparison import difference

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="needs a GPU: torch.cuda.is_available() is False",
)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def whole_products(monkeypatch):
    """fp32 products in fp32."""
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


@pytest.mark.parametrize("name", CASES)
def test_the_gpu_trains_like_the_cpu(name):
    check(
        CASES[name],
        train(CASES[name], torch.device("cuda", 0)),
        train(CASES[name], CPU),
    )


@pytest.mark.parametrize("name", ["gpt2", "llama bf16"])
def test_a_run_on_a_gpu_is_repeated_to_the_bit(name):
    (trace, weights), _ = train(CASES[name], torch.device("cuda", 0))
    (again, weights_again), _ = train(CASES[name], torch.device("cuda", 0))
    assert trace.losses == again.losses and len(trace.losses) == STEPS
    assert all(torch.equal(weights[key], weights_again[key]) for key in weights)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_kernels_train_like_torchs_operations(dtype):
    name = {"fp32": "gpt2", "bf16": "gpt2 bf16", "fp16": "llama fp16"}[dtype]
    (own, model), (by_torch, _) = (
        train(CASES[name], torch.device("cuda", 0), more)
        for more in ((), ("--kernels", "torch"))
    )
    assert difference(own, by_torch, model).is_within(LIMITS[dtype])


def test_deterministic_attention_repeats_its_gradients_to_the_bit():
    """Several blocks of keys add to one gradient; without the mode, in the order in which they end."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(4096, 1, 4, 128, generator=draw).to("cuda", torch.bfloat16)
        for _ in range(3)
    )

    def gradients():
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        attention(*leaves).float().square().sum().backward()
        return [leaf.grad for leaf in leaves]

    with deterministic_operations(True):
        runs = [gradients() for _ in range(4)]
    for again in runs[1:]:
        assert all(map(torch.equal, again, runs[0]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("overwrites", [False, True])
def test_gradients_of_weights_are_added_to_fp32_without_being_rounded(
    dtype, overwrites
):
    assert fp32_sums.reason_against() == ""
    assert add_product_.has(FP32_SUMS, "cuda", torch.float32)
    draw = torch.Generator().manual_seed(0)
    dy, x = (
        torch.randn(512, width, generator=draw).to("cuda", dtype) for width in (96, 160)
    )
    total = torch.randn(96, 160, generator=draw).to("cuda")
    exact = dy.double().t() @ x.double() + (0 if overwrites else total.double())
    add_product_(total, dy.t(), x, overwrites)
    error = (total.double() - exact).abs().max() / exact.abs().max()
    assert error < 1e-5, error.item()
    runs = RowRuns((200, 0, 312), torch.tensor([200, 0, 312], device="cuda"))
    summed = torch.zeros(3, 96, 160, device="cuda")
    add_grouped_gradient_(summed, dy, x, runs, overwrites)
    for run, rows in ((0, slice(0, 200)), (2, slice(200, 512))):
        exact = dy[rows].double().t() @ x[rows].double()
        assert (summed[run].double() - exact).abs().max() / exact.abs().max() < 1e-5
    assert not summed[1].any()
