"""Checkpoints with experts are read by the tool that generates text, the memories of their routers too."""

from dataclasses import replace

import pytest
import torch

from megatron_ds.checkpoint.load import read_run
from megatron_ds.commands.generate_text import load_model
from megatron_ds.config.sources.config_text import from_dict
from megatron_ds.mpu.grid import Grid
from megatron_ds.mpu.launch import connect_torch
from megatron_ds.mpu.mesh import Mesh
from tests.harness.pretraining import MOCK, STEPS, VOCAB, train

pytestmark = pytest.mark.processes

SIGMOID = (
    "--num-experts 4 --moe-router-topk 2 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --expert-model-parallel-size 2"
).split()


def test_text_is_generated_with_the_bias_of_each_expert_that_training_saved(tmp_path):
    train(2, [*MOCK, *SIGMOID, "--save", tmp_path])
    config = from_dict(read_run(tmp_path, STEPS)["config"])
    config = replace(
        config, model=replace(config.model, vocab_size=VOCAB + 1)
    )  # and the end of a document
    mesh = Mesh(Grid(), 0, connect_torch, torch.device("cpu"))
    modules = load_model(config, mesh, tmp_path, STEPS)
    biases = [
        block.mlp.router.balance.bias for block in modules if hasattr(block, "mlp")
    ]
    assert len(biases) == 2
    for bias in biases:  # moved by ± the rate after each of the steps
        moves = bias / config.model.moe_router_bias_update_rate
        assert 1 <= moves.abs().max() <= STEPS + 1e-3
        assert torch.allclose(moves, moves.round(), atol=1e-3)
