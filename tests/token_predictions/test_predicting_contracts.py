"""A GPT that predicts several tokens keeps the contracts of models, and a launch finds what was planned."""

from contextlib import contextmanager
from dataclasses import replace

import pytest

from megatron_ds.config import parse
from megatron_ds.models import MODELS, gpt_layers, language_model
from megatron_ds.models.layer import LayerFlops
from megatron_ds.mpu.context import ParallelContext
from megatron_ds.planning.layer_costs import layer_costs, time_layers
from tests.contracts.test_models import CONTRACTS
from tests.harness.model_runs import context_of

pytestmark = pytest.mark.threads

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


def test_the_cut_and_the_times_of_layers_know_the_depths():
    plain = configured()
    config = configured("--mtp-num-layers", "2", "--pipeline-cut", "parameters")
    for cut, more in (("flops", ()), ("parameters", ("--pipeline-cut", "parameters"))):
        costs = []
        for depths in ("0", "2"):
            one = configured("--mtp-num-layers", depths, *more)
            layers = MODELS["gpt"](one.model, context_of())
            costs.append([*layer_costs(one, layers).values()][-1].total)
        assert costs[1] > 2 * costs[0], cut
    without, timed = (time_layers(c, context_of()) for c in (plain, config))
    assert timed["predicting_head"].weight_grad > 0
    assert timed["predicting_head"].total > 1.5 * without["head"].total
