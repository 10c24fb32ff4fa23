"""Predicted bytes equal allocated bytes. Building an optimizer communicates nothing, so a rank can be built alone."""

import pytest
import torch
from torch import nn

from megatron_ds.mpu.group import Group, solo
from megatron_ds.mpu.param_spec import Init, ParamSpec
from megatron_ds.zero.layout import plan_layout
from megatron_ds.zero.memory import predict_memory
from megatron_ds.zero.optimizer import DataGroups, ZeroOptimizer
from megatron_ds.zero.policy import STAGES
from megatron_ds.zero.scaler import LossScaler

SHAPES = {"embedding": (50, 9), "bias": (7,), "weight": (33, 40), "scalar": (1,)}


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_predicted_bytes_equal_allocated_bytes(stage, dtype, rank):
    parameters = []
    for name, shape in SHAPES.items():
        p = nn.Parameter(torch.ones(shape, dtype=dtype))
        p.spec = ParamSpec(name, shape, Init("ones"))
        parameters.append(p)
    groups = DataGroups(data=Group("dp-cp", (0, 1, 2), rank), expert=solo(), tp=solo(), model=solo(), tied=solo())
    optimizer = ZeroOptimizer(parameters, uses={}, groups=groups, policy=STAGES[stage],
                              make_optimizer=lambda g: torch.optim.AdamW(g, fused=True), scaler=LossScaler(), clip_grad=1.0,
                              bucket_elements=500, overlap=True)
    layout = plan_layout([(p.spec.name, p.numel()) for p in parameters], 500, 3)
    predicted = predict_memory(layout, rank, STAGES[stage], parameter_bytes=dtype.itemsize)
    assert optimizer.memory() == predicted
    assert optimizer.memory().total == predicted.total > 0


def test_stage_1_keeps_a_third_of_masters_and_moments_on_three_ranks():
    layout = plan_layout([("w", 64 * 3 * 100)], 10 ** 9, 3)
    whole, split = (predict_memory(layout, 1, STAGES[stage], parameter_bytes=2) for stage in (0, 1))
    assert split.masters * 3 == whole.masters and split.optimizer * 3 == whole.optimizer
    assert (split.parameters, split.gradients) == (whole.parameters, whole.gradients) == (2 * 19200, 4 * 19200)
