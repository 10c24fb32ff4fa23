"""The pipeline over real gloo ranks."""

import pytest
import torch

from megatron_ds.mpu.channels import Channels
from megatron_ds.pipeline.instruction import Op
from megatron_ds.pipeline.passes import lower
from megatron_ds.pipeline.schedules import SCHEDULES
from tests.harness.pipelines import make_batches, make_executor, make_layers, train_in_one_piece
from tests.harness.processes import run_processes

BOUNDS = (0, 2, 3, 5)


def train_on_a_rank(rank, world, name, m):
    """Losses of a training step and of an evaluation after it, and the gradients of this rank's layers."""
    program = lower(SCHEDULES[name](3, m), 3)[rank]
    layers = make_layers(3)
    executor = make_executor(program, layers, BOUNDS, Channels(world.group("pp", (0, 1, 2), rank)), lambda stage: stage, rank,
                             {Op.REDUCE: lambda stage: None})
    objectives = [[loss.objective for loss in step(make_batches(m))] for step in (executor.run, executor.forward)]
    return objectives, [p.grad for layer in layers[BOUNDS[rank]:BOUNDS[rank + 1]] for p in layer.parameters()]


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_processes_give_the_losses_and_gradients_of_one_process_to_the_last_bit(name):
    results = run_processes(3, train_on_a_rank, name, 4)
    layers = make_layers(3)
    expected = train_in_one_piece(layers, make_batches(4), 1.0)
    trained, evaluated = results[-1][0]
    assert all(map(torch.equal, trained, expected)) and all(map(torch.equal, evaluated, expected))
    assert len(trained) == len(evaluated) == 4 and results[0][0] == [[], []]
    gradients = [grad for _, held in results for grad in held]
    assert all(torch.equal(ours, p.grad)
               for ours, p in zip(gradients, (p for layer in layers for p in layer.parameters()), strict=True))
