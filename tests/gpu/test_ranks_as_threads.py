"""One GPU, many ranks: each layout trains to the same bits whether its collectives arrive late or at once."""

import pytest
import torch

from tests.harness.device_ranks import train_on_one_gpu

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="needs a GPU: torch.cuda.is_available() is False",
)
MOE = ("--num-experts", "4", "--moe-router-topk", "2")
CASES = [
    ("zero=0,dp=2", "fp32", ()),
    ("zero=1,dp=2", "bf16", ()),
    ("zero=2,dp=2", "bf16", ()),
    ("zero=3,dp=2", "bf16", ()),
    ("zero=3,dp=4,hpz=2", "fp32", ()),
    ("zero=1,dp=2,offload=cpu", "fp32", ()),
    ("tp=2", "bf16", ()),
    ("tp=2,sp=1", "bf16", ()),
    ("cp=2", "bf16", ()),
    ("cp=2,comm_type=a2a", "bf16", ()),
    ("pp=2", "fp32", ()),
    ("pp=2,schedule=zb-h1", "bf16", ()),
    ("pp=2,schedule=interleaved", "bf16", ()),
    ("ep=2,dp=2,zero=1", "bf16", MOE),
    ("tp=2,sp=1,pp=2,dp=2,zero=1", "bf16", ()),
]


@pytest.fixture(autouse=True)
def repeatable(monkeypatch):
    """Attention's backward of torch, summed in one order; the environment that cuBLAS needs for it."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize(
    ("layout", "dtype", "more"), CASES, ids=lambda value: str(value)
)
def test_late_collectives_change_no_bit(layout, dtype, more):
    trace, weights = train_on_one_gpu(layout, None, dtype, more)
    for seed in range(2):
        late, late_weights = train_on_one_gpu(layout, seed, dtype, more)
        assert late.losses == trace.losses
        assert late.grad_norms == trace.grad_norms
        assert all(torch.equal(weights[key], late_weights[key]) for key in weights)
