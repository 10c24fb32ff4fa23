"""The pipeline over real gloo ranks."""

import pytest
import torch

from megatron_ds.mpu.channels import Channels
from megatron_ds.pipeline.instruction import Op
from megatron_ds.pipeline.passes import lower
from megatron_ds.pipeline.schedules import SCHEDULES, placement
from tests.harness.pipelines import (
    make_batches,
    make_executor,
    make_layers,
    train_in_one_piece,
)
from tests.harness.processes import run_processes

pytestmark = pytest.mark.processes

CASES = [
    (name, p, m, chunks)
    for name in SCHEDULES
    for p, m, chunks in ((3, 4, 1), (2, 3, 2), (4, 7, 2))
    if SCHEDULES[name].supports(chunks)
]


def cut_of(p, chunks):
    """Uneven: the first stage holds the embedding and a block, the last one block and head."""
    stages = p * chunks
    return (0, *range(2, stages + 1), stages + 2)


def train_on_a_rank(rank, world, name, p, m, chunks):
    """Losses of a training step and of an evaluation after it, and the gradients of this rank's layers by
    number."""
    bounds, home = cut_of(p, chunks), placement(name, p, chunks)
    program, layers = (
        lower(SCHEDULES[name](p, m, chunks), p * chunks)[rank],
        make_layers(bounds[-1] - 2),
    )
    executor = make_executor(
        program,
        layers,
        bounds,
        Channels(world.group("pp", tuple(range(p)), rank)),
        home.__getitem__,
        rank,
        {Op.REDUCE: lambda stage: None},
    )
    objectives = [
        [loss.objective for loss in step(make_batches(m))]
        for step in (executor.run, executor.forward)
    ]
    return objectives, {
        at: [p.grad for p in layers[at].parameters()]
        for s in executor.stages
        for at in range(bounds[s], bounds[s + 1])
    }


@pytest.mark.quick
@pytest.mark.one_in(5)
@pytest.mark.parametrize("name, p, m, chunks", CASES)
def test_processes_give_the_losses_and_gradients_of_one_process_to_the_last_bit(
    name, p, m, chunks
):
    results = run_processes(p, train_on_a_rank, name, p, m, chunks)
    layers = make_layers(cut_of(p, chunks)[-1] - 2)
    expected = train_in_one_piece(layers, make_batches(m), 1.0)
    trained, evaluated = results[placement(name, p, chunks)[-1]][0]
    assert all(map(torch.equal, trained, expected)) and all(
        map(torch.equal, evaluated, expected)
    )
    assert len(trained) == len(evaluated) == m
    gradients = {at: grads for _, held in results for at, grads in held.items()}
    assert sorted(gradients) == list(range(len(layers)))
    for at, layer in enumerate(layers):
        assert all(
            torch.equal(ours, p.grad)
            for ours, p in zip(gradients[at], layer.parameters(), strict=True)
        )
