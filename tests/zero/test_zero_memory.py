"""Predicted bytes equal allocated bytes. Building an optimizer communicates nothing, so a rank can be built
alone."""

import pytest
import torch
from torch import nn

from megatron_ds.mpu.group import Group
from megatron_ds.mpu.param_spec import DATA_AXES, Init, ParamSpec
from megatron_ds.optim import default_groups
from megatron_ds.zero.data_groups import DataGroups
from megatron_ds.zero.optimizer import ZeroOptimizer
from megatron_ds.zero.prediction import ElementBytes, predict_memory, predict_sets
from megatron_ds.zero.set_plan import Fact, ParameterUse, plan_sets
from megatron_ds.zero.settings import HIERARCHICAL, STAGES, ZeroSettings

pytestmark = pytest.mark.plan

SHAPES = {"embedding": (50, 9), "bias": (7,), "weight": (33, 40), "scalar": (1,)}


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "dtype, grad_dtype",
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("size", [1, 3])
def test_predicted_bytes_equal_allocated_bytes(stage, dtype, grad_dtype, rank, size):
    parameters = []
    for name, shape in SHAPES.items():
        p = nn.Parameter(torch.ones(shape, dtype=dtype))
        p.spec = ParamSpec(name, shape, Init("ones"))
        parameters.append(p)
    rank %= size
    settings = ZeroSettings(
        default_groups(lambda g: torch.optim.AdamW(g, fused=True)),
        STAGES[stage],
        bucket_elements=500,
        persistence=8,
        grad_dtype=grad_dtype,
    )
    groups = DataGroups({DATA_AXES: Group("dp-cp", tuple(range(size)), rank)})
    optimizer = ZeroOptimizer(
        parameters,
        settings,
        groups,
        ParameterUse({0: [parameters[:2], parameters[2:]]}),
    )
    facts = [
        Fact(p.spec.name, p.numel(), str(dtype), stage=0, layer=i // 2)
        for i, p in enumerate(parameters)
    ]
    plans = plan_sets(facts, settings, {DATA_AXES: size})
    predicted = predict_sets(
        plans, {DATA_AXES: rank}, ElementBytes(dtype.itemsize, grad_dtype.itemsize)
    )
    assert optimizer.memory() == predicted
    assert optimizer.memory().total == predicted.total > 0
    if stage == 3 and size > 1:
        assert sorted(len(plan.members) for plan in plans) == [
            2,
            2,
        ]  # the bias and the scalar are small


@pytest.mark.parametrize("n", [1, 2, 4, 8])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_state_is_what_the_paper_promises(stage, n):
    """Rajbhandari et al. 2020, figure 1, with 16-bit gradients: padding is at most 64 n elements a bucket."""
    sizes = [9_000_000, *[1_770_000, 3_000] * 24]
    psi = sum(sizes)
    facts = [
        Fact(f"p{i}", numel, "bf16", stage=0, layer=i) for i, numel in enumerate(sizes)
    ]
    plans = plan_sets(
        facts,
        ZeroSettings((), STAGES[stage], bucket_elements=8_000_000),
        {DATA_AXES: n},
    )
    bytes_held = predict_sets(plans, {DATA_AXES: n - 1}, ElementBytes(2, 2)).total
    promised = {
        0: 16 * psi,
        1: 4 * psi + 12 * psi / n,
        2: 2 * psi + 14 * psi / n,
        3: 16 * psi / n,
    }[stage]
    assert bytes_held == pytest.approx(promised, rel=0.005)


@pytest.mark.parametrize("n, h", [(4, 2), (6, 3), (8, 8)])
def test_a_hierarchy_keeps_weights_over_inner_groups_and_the_rest_over_all(n, h):
    sizes = [9_000_000, *[1_770_000, 3_000] * 24]
    psi = sum(sizes)
    facts = [
        Fact(f"p{i}", numel, "bf16", stage=0, layer=i) for i, numel in enumerate(sizes)
    ]
    plans = plan_sets(
        facts,
        ZeroSettings((), HIERARCHICAL, bucket_elements=8_000_000),
        {DATA_AXES: n},
        inner_shards=h,
    )
    held = predict_sets(plans, {DATA_AXES: n - 1}, ElementBytes(2, 2))
    assert held.parameters == pytest.approx(
        2 * psi / h, rel=0.01
    )  # the smallest stay whole
    assert held.total - held.parameters == pytest.approx(14 * psi / n, rel=0.005)


def test_stage_1_keeps_a_third_of_masters_and_moments_on_three_ranks():
    facts = [Fact("w", 64 * 3 * 100, "bf16")]
    plan_of = lambda stage: plan_sets(
        facts, ZeroSettings((), STAGES[stage]), {DATA_AXES: 3}
    )[0]
    whole, split = (
        predict_memory(plan_of(stage), 1, ElementBytes(2)) for stage in (0, 1)
    )
    assert split.masters * 3 == whole.masters and split.optimizer * 3 == whole.optimizer
    assert (
        (split.parameters, split.gradients)
        == (whole.parameters, whole.gradients)
        == (2 * 19200, 4 * 19200)
    )
