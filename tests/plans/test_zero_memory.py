"""Predicted bytes equal allocated bytes. Building an optimizer communicates nothing, so a rank can be built alone."""

import pytest
import torch
from torch import nn

from megatron_ds.mpu.group import Group, solo
from megatron_ds.mpu.param_spec import Init, ParamSpec
from megatron_ds.zero.layout import plan_layout
from megatron_ds.zero.optimizer import DataGroups, LayerPlan, ZeroOptimizer
from megatron_ds.zero.prediction import predict_memory, predict_sets
from megatron_ds.zero.scaler import LossScaler
from megatron_ds.zero.set_plan import Fact, plan_sets
from megatron_ds.zero.settings import HIERARCHICAL, STAGES

SHAPES = {"embedding": (50, 9), "bias": (7,), "weight": (33, 40), "scalar": (1,)}


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype, grad_dtype", [(torch.float32, torch.float32), (torch.bfloat16, torch.float32),
                                               (torch.bfloat16, torch.bfloat16)])
@pytest.mark.parametrize("size", [1, 3])
def test_predicted_bytes_equal_allocated_bytes(stage, dtype, grad_dtype, rank, size):
    parameters = []
    for name, shape in SHAPES.items():
        p = nn.Parameter(torch.ones(shape, dtype=dtype))
        p.spec = ParamSpec(name, shape, Init("ones"))
        parameters.append(p)
    rank %= size
    groups = DataGroups(data=Group("dp-cp", tuple(range(size)), rank), expert=solo(), tp=solo(), model=solo(), tied=solo())
    layers = LayerPlan({0: [parameters[:2], parameters[2:]]}, persistence=8)
    optimizer = ZeroOptimizer(parameters, uses={}, groups=groups, policy=STAGES[stage],
                              make_optimizer=lambda g: torch.optim.AdamW(g, fused=True), scaler=LossScaler(), clip_grad=1.0,
                              bucket_elements=500, overlap=True, layer_plan=layers, grad_dtype=grad_dtype)
    facts = [Fact(p.spec.name, p.numel(), str(dtype), stage=0, layer=i // 2) for i, p in enumerate(parameters)]
    plans = plan_sets(facts, STAGES[stage], data_shards=size, expert_shards=1, bucket_elements=500, persistence=8)
    predicted = predict_sets(plans, rank, 0, parameter_bytes=dtype.itemsize, gradient_bytes=grad_dtype.itemsize)
    assert optimizer.memory() == predicted
    assert optimizer.memory().total == predicted.total > 0
    if stage == 3 and size > 1:
        assert sorted(len(plan.members) for plan in plans) == [2, 2]        # the bias and the scalar are small


@pytest.mark.parametrize("n", [1, 2, 4, 8])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_state_is_what_the_paper_promises(stage, n):
    """Rajbhandari et al. 2020, figure 1, with 16-bit gradients: padding is at most 64 n elements a bucket."""
    sizes = [9_000_000, *[1_770_000, 3_000] * 24]
    psi = sum(sizes)
    facts = [Fact(f"p{i}", numel, "bf16", stage=0, layer=i) for i, numel in enumerate(sizes)]
    plans = plan_sets(facts, STAGES[stage], data_shards=n, expert_shards=n, bucket_elements=8_000_000)
    bytes_held = predict_sets(plans, n - 1, n - 1, parameter_bytes=2, gradient_bytes=2).total
    promised = {0: 16 * psi, 1: 4 * psi + 12 * psi / n, 2: 2 * psi + 14 * psi / n, 3: 16 * psi / n}[stage]
    assert bytes_held == pytest.approx(promised, rel=0.005)


@pytest.mark.parametrize("n, h", [(4, 2), (6, 3), (8, 8)])
def test_a_hierarchy_keeps_weights_over_inner_groups_and_the_rest_over_all(n, h):
    sizes = [9_000_000, *[1_770_000, 3_000] * 24]
    psi = sum(sizes)
    facts = [Fact(f"p{i}", numel, "bf16", stage=0, layer=i) for i, numel in enumerate(sizes)]
    plans = plan_sets(facts, HIERARCHICAL, data_shards=n, expert_shards=n, bucket_elements=8_000_000, inner_shards=h)
    held = predict_sets(plans, n - 1, 0, parameter_bytes=2, gradient_bytes=2)
    assert held.parameters == pytest.approx(2 * psi / h, rel=0.01)              # the smallest stay whole
    assert held.total - held.parameters == pytest.approx(14 * psi / n, rel=0.005)


def test_stage_1_keeps_a_third_of_masters_and_moments_on_three_ranks():
    layout = plan_layout([("w", 64 * 3 * 100)], 10 ** 9, 3)
    whole, split = (predict_memory(layout, 1, STAGES[stage], parameter_bytes=2) for stage in (0, 1))
    assert split.masters * 3 == whole.masters and split.optimizer * 3 == whole.optimizer
    assert (split.parameters, split.gradients) == (whole.parameters, whole.gradients) == (2 * 19200, 4 * 19200)
