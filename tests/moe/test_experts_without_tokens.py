"""Experts that no token reaches: their gradient is zero, and its reduction begins where that of other ranks does."""

import pytest
import torch

from megatron_ds.moe import router
from megatron_ds.zero.buckets import GradBuckets
from megatron_ds.zero.grad_shards import GradShards
from tests.harness.late_messages import LateNetwork
from tests.harness.layout_comparison import difference
from tests.harness.layout_runs import run_layout
from tests.harness.moe_runs import job_of
from tests.harness.tiny_jobs import TOLERANCE

pytestmark = pytest.mark.threads

STEPS = 2


@pytest.fixture
def first_experts(monkeypatch):
    """All tokens choose experts 0 and 1."""
    chosen = lambda values, k: torch.arange(k).expand(*values.shape[:-1], k)
    monkeypatch.setattr(router, "largest", chosen)


@pytest.mark.parametrize("store, zero", [(GradBuckets, 1), (GradShards, 2)])
def test_gradients_of_experts_without_tokens_are_reduced_in_the_backward(
    first_experts, monkeypatch, store, zero
):
    """On every rank all expert buckets are under way before `complete` would begin the rest."""
    left, complete = [], store.complete

    def noted(gradients):
        if gradients.ranks.data.axes == "edp":
            left.append(len(gradients.layout.buckets) - gradients._next)
        complete(gradients)

    monkeypatch.setattr(store, "complete", noted)
    job = job_of("--moe-router-topk", "2", "--reduce-bucket-size", "4096")
    run = run_layout(job, f"dp=4,ep=2,zero={zero}", STEPS, LateNetwork().transport)
    alone = run_layout(job, "mbs=1", STEPS)
    found = difference(run.merged, alone.merged, run.model)
    assert found.is_within(TOLERANCE["fp32"]), found
    assert len(left) >= 4 * STEPS and not any(left)
