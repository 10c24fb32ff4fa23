"""One GPU: training there follows training on the CPU: all dtypes, offload, loss scaling, experts."""

import pytest
import torch

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
