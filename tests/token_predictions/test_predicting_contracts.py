"""A GPT that predicts several tokens keeps the contracts of models, and a launch finds what was planned."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from megatron_ds import planning
from megatron_ds.config import parse
from megatron_ds.models import MODELS, gpt_layers, language_model
from megatron_ds.models.layer import LayerFlops
from megatron_ds.mpu.context import ParallelContext
from megatron_ds.planning.layer_costs import LayerCost, layer_costs, time_layers
from tests.contracts.test_models import CONTRACTS
from tests.harness.model_runs import context_of

pytestmark = [pytest.mark.threads, pytest.mark.one_in(4)]

SIZES = (
    "--num-layers 4 --hidden-size 24 --num-attention-heads 4 --seq-length 16 --vocab-size 60 --mock-data "
    "--make-vocab-size-divisible-by 4 --position-embedding-type rope --train-iters 2 --lr 1e-3 "
    "--micro-batch-size 1 --global-batch-size 4"
).split()


@contextmanager
def registered(name, **changes):
    def layers(config, ctx):
        more = {"mtp_num_layers": 2, "position_embedding_type": "rope", **changes}
        return gpt_layers(replace(config, **more), ctx)

    MODELS.register(name)(language_model(layers))
    try:
        yield
    finally:
        del MODELS._things[name]


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda contract: contract.__name__)
@pytest.mark.parametrize(
    "unties",
    [False, pytest.param(True, marks=pytest.mark.rest)],
    ids=["tied", "untied"],
)
def test_a_model_with_depths_keeps_the_contract(unties, contract, tmp_path):
    # Runs of one process are kept by the name of the model.
    name = f"predicting-gpt-{unties}"
    with registered(name, untie_embeddings_and_output_weights=unties):
        contract(name, tmp_path / "run")


def configured(*more):
    return parse([*SIZES, *more])


def flops(config, kind: str) -> LayerFlops:
    layers = MODELS["gpt"](config.model, ParallelContext())
    return next(layer.flops(16, 60) for layer in layers if layer.kind.startswith(kind))


def test_a_depth_costs_a_block_a_head_and_a_projection():
    plain = configured()
    config = configured("--mtp-num-layers", "3")
    head = flops(plain, "head")
    block = flops(plain, "block")
    found = flops(config, "predicting_head")
    # of 2 h columns and h rows, forward and both halves of backward
    projection = 3 * 2 * 16 * 2 * 24 * 24
    assert found.weights == head.weights * 4 + 3 * (block.weights + projection)
    assert found.scores == 3 * block.scores


@pytest.mark.parametrize("cut", ["flops", "parameters"])
def test_the_cut_knows_the_depths(cut):
    costs = []
    for depths in ("0", "2"):
        config = configured("--mtp-num-layers", depths, "--pipeline-cut", cut)
        layers = MODELS["gpt"](config.model, context_of())
        costs.append([*layer_costs(config, layers).values()][-1].total)
    assert costs[1] > 2 * costs[0]


def test_measured_times_are_those_of_the_losses_of_depths_too(monkeypatch):
    """The backward that is timed reaches the weights of the depths."""
    reached = {}

    def once(module, x, batch, finish, device):
        given = None if x is None else x.detach().requires_grad_()
        y = finish(module(given, batch))
        y.backward(None if y.dim() == 0 else torch.ones_like(y))
        for p in module.parameters():
            reached[p.spec.name] = p.grad is not None and bool(p.grad.any())
        return LayerCost(1.0, 1.0, 1.0)

    monkeypatch.setattr(planning.layer_costs, "_time_layer", once)
    time_layers(configured("--mtp-num-layers", "2"), context_of())
    assert reached["mtp.layers.1.eh_proj.weight"]
    assert reached["mtp.layers.0.transformer_layer.mlp.linear_fc2.weight"]
