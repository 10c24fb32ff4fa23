"""The operations that the start-up text lists are those that the steps of a run call."""

from unittest.mock import patch

import pytest
import torch

from megatron_ds.config import parse
from megatron_ds.mpu.grid import Grid
from megatron_ds.mpu.mesh import Mesh
from megatron_ds.ops.kernel_table import OPERATIONS, Operation, kernels_text
from megatron_ds.training.used_operations import CONDITIONS, used_operations
from tools.compare_layouts import SEQ_LENGTH, VOCAB, tiny_job
from tools.layout_comparison import random_samples, train_layout

MOE = "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01".split()
PADDED = [*MOE, "--moe-expert-capacity-factor", "1", "--moe-pad-expert-input-to-capacity"]


@pytest.mark.parametrize("style, dropout, more", [
    ("gpt2", 0.1, []), ("llama", 0.0, []), ("gpt2", 0.0, MOE), ("llama", 0.0, PADDED),
    ("llama", 0.0, ["--qk-layernorm"]), ("llama", 0.0, ["--rotary-interleaved"]),
    ("gpt2", 0.0, ["--use-parallel-residual", "--no-adam-bias-correction"]), ("gpt2", 0.0, ["--bf16"])])
def test_listed_operations_are_those_that_run(style, dropout, more):
    flags = [*tiny_job(style, "fp32", False, dropout, 1, 2, 1), "--micro-batch-size", "2", *more]
    config, called, call = parse(flags, world_size=1), set(), Operation.__call__

    def recorded(operation, *arguments, **named):
        called.add(operation.name)
        return call(operation, *arguments, **named)

    mesh = Mesh(Grid.fit(1), 0, lambda *args: None, torch.device("cpu"))
    with patch.object(Operation, "__call__", recorded):
        train_layout(config, mesh, 1, random_samples(4, SEQ_LENGTH, VOCAB, seed=1))
    used = used_operations(config, "cpu")
    assert called == set(used)
    text = kernels_text(torch.device("cpu"), torch.float32, used)
    assert "affine" in text and "quantize" not in text
    assert ("permute" in text) == (MOE[0] in more)


def test_conditions_are_of_operations_that_exist():
    assert CONDITIONS.keys() <= OPERATIONS.keys() | {"quantize", "dequantize", "cast_fp8"}
