"""Checkpoints with experts are read by the tool that generates text, the memories of their routers too."""

import pytest
import torch

from megatron_ds.extensions.evaluation.checkpoint_model import (
    evaluation_config,
    load_model,
)
from megatron_ds.extensions.generation.saved_flags import saved_flags
from megatron_ds.mpu.launch_facts import Launch
from megatron_ds.mpu.mesh import Mesh
from megatron_ds.mpu.process_groups import connect_torch
from tests.harness.pretraining import MOCK, STEPS, train

pytestmark = pytest.mark.processes

SIGMOID = (
    "--num-experts 4 --moe-router-topk 2 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --expert-model-parallel-size 2 --bf16"
).split()


@pytest.mark.quick
def test_text_is_generated_with_the_bias_of_each_expert_that_training_saved(tmp_path):
    train(2, [*MOCK, *SIGMOID, "--save", tmp_path])
    flags = saved_flags(tmp_path, STEPS, [], 1)
    config = evaluation_config(flags, Launch(world_size=1))
    assert config.optimizer.bf16
    mesh = Mesh(config.grid(1), 0, connect_torch, torch.device("cpu"))
    modules = load_model(config, mesh).replica.modules
    biases = [
        block.mlp.router.balance.bias for block in modules if hasattr(block, "mlp")
    ]
    assert len(biases) == 2
    for bias in biases:  # moved by ± the rate after each of the steps
        moves = bias / config.model.moe_router_bias_update_rate
        assert 1 <= moves.abs().max() <= STEPS + 1e-3
        assert torch.allclose(moves, moves.round(), atol=1e-3)
