"""Which parameter, on which stage, is the first that is not finite."""

import math

import pytest
import torch

from megatron_ds.config import parse
from megatron_ds.extensions.guards.nan_locator import locate_nonfinite
from megatron_ds.models import MODELS
from megatron_ds.mpu.grid import Grid
from megatron_ds.mpu.mesh import Mesh
from tests.harness.model_runs import context_of
from tests.planning.test_bert_plans import BASE

pytestmark = pytest.mark.plan

FINITE = (
    "no module had a non-finite output in a second forward: the loss itself is the first non-finite "
    "value"
)


@pytest.mark.parametrize(
    "spoiled, stage",
    [
        ([], None),
        (["lm_head.dense.bias"], 7),
        (["binary_head.weight"], 7),
        (["encoder.final_layernorm.weight"], 6),
        (["lm_head.dense.bias", "encoder.layers.2.mlp.linear_fc1.weight"], 4),
        (["embedding.word_embeddings.weight"], 1),
    ],
)
def test_a_parameter_that_is_not_finite_is_found_on_the_stage_that_holds_it(
    spoiled, stage
):
    layers = {
        layer.name: (1 + at, layer.make())
        for at, layer in enumerate(MODELS["bert"](parse(BASE).model, context_of()))
    }
    weights = {
        p.spec.name: torch.zeros(3)
        for _, module in layers.values()
        for p in module.parameters()
    }
    for name in spoiled:
        weights[name][1] = math.nan
    said = locate_nonfinite(layers, weights.items(), lambda: None, Mesh(Grid(), 0))
    where = f"first seen on rank 0 (pipeline stage {stage}): parameter"
    assert said == (
        f"{where} {spoiled[-1]} holds non-finite values" if spoiled else FINITE
    )
