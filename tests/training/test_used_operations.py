"""The operations that the start-up text lists are those that the steps of a run call."""

from unittest.mock import patch

import pytest
import torch

from megatron_ds.config import parse
from megatron_ds.mpu.grid import Grid
from megatron_ds.mpu.mesh import Mesh
from megatron_ds.ops.kernel_table import OPERATIONS, Operation, kernels_text
from megatron_ds.training.used_operations import CONDITIONS, used_operations
from tests.harness.threads import run_ranks
from tools.compare_layouts import SEQ_LENGTH, VOCAB, tiny_job
from tools.layout_comparison import random_samples, train_layout

pytestmark = pytest.mark.threads

MOE = "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01".split()
PADDED = [
    *MOE,
    "--moe-expert-capacity-factor",
    "1",
    "--moe-pad-expert-input-to-capacity",
]


def called_by_a_step(config):
    """The names of the operations that one step of all ranks calls."""
    called, call = set(), Operation.__call__

    def recorded(operation, *arguments, **named):
        called.add(operation.name)
        return call(operation, *arguments, **named)

    grid, samples = (
        Grid.fit(config.world_size),
        random_samples(4, SEQ_LENGTH, VOCAB, seed=1),
    )
    with patch.object(Operation, "__call__", recorded):
        run_ranks(
            config.world_size,
            lambda rank, world: train_layout(
                config, Mesh(grid, rank, world.connect, torch.device("cpu")), 1, samples
            ),
        )
    return called


@pytest.mark.parametrize(
    "style, dropout, more",
    [
        ("gpt2", 0.1, []),
        ("llama", 0.0, []),
        ("gpt2", 0.0, MOE),
        ("llama", 0.0, PADDED),
        ("llama", 0.0, ["--qk-layernorm"]),
        ("llama", 0.0, ["--rotary-interleaved"]),
        ("gpt2", 0.0, ["--use-parallel-residual", "--no-adam-bias-correction"]),
        ("gpt2", 0.0, ["--bf16"]),
    ],
)
def test_listed_operations_are_those_that_run(style, dropout, more):
    flags = [
        *tiny_job(style, "fp32", False, dropout, 1, 2, 1),
        "--micro-batch-size",
        "2",
        *more,
    ]
    config = parse(flags, world_size=1)
    used = used_operations(config, "cpu")
    assert called_by_a_step(config) == set(used)
    text = kernels_text(torch.device("cpu"), torch.float32, used)
    assert "affine" in text and "quantize" not in text
    assert ("permute" in text) == (MOE[0] in more)


@pytest.mark.parametrize(
    "ranks, quantized, is_used",
    [
        (1, ["--zero-quantized-weights"], False),
        (2, ["--zero-quantized-weights"], True),
        (1, ["--zero-quantized-gradients"], False),
        (2, ["--zero-quantized-gradients"], True),
        (2, [], False),
    ],
)
def test_quantized_weights_and_gradients_are_listed(ranks, quantized, is_used):
    config = parse(
        [
            *tiny_job("llama", "fp32", False, 0.0, 1, 2, 1),
            "--micro-batch-size",
            "1",
            "--zero-stage",
            "3",
            "--stage3-param-persistence-threshold",
            "0",
            *quantized,
        ],
        world_size=ranks,
    )
    used = used_operations(config, "cpu")
    assert called_by_a_step(config) == set(used)
    assert ({"quantize", "dequantize"} <= set(used)) == is_used == ("quantize" in used)


def test_decoding_has_the_dtype_of_its_scales_in_the_text():
    """It is listed for a run whose weights have 16 bits."""
    planned = torch.device("meta")
    assert (
        kernels_text(planned, torch.bfloat16, ["dequantize"])
        == "kernels: dequantize cuda"
    )


def test_conditions_are_of_operations_that_exist():
    assert CONDITIONS.keys() <= OPERATIONS.keys()
