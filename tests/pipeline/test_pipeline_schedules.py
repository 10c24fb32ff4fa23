"""Every registered schedule on threaded ranks: gradients are those of one process to the last bit, whatever
the shape."""

from functools import partial

import pytest
import torch

from megatron_ds.models import MODELS, build_stage, gpt_loss, run_layers
from megatron_ds.mpu.channels import Channels
from megatron_ds.mpu.group import solo
from megatron_ds.pipeline.executor import Executor
from megatron_ds.pipeline.instruction import Op
from megatron_ds.pipeline.passes import lower
from megatron_ds.pipeline.schedules import SCHEDULES, placement, stages_of
from megatron_ds.pipeline.stage import Stage
from tests.harness.gpt_runs import make_batch
from tests.harness.model_runs import context_of
from tests.harness.pipelines import (
    SCALE,
    PostOffice,
    RendezvousChannels,
    assert_equals_one_process,
    make_batches,
    make_executor,
    make_layers,
    pipeline_group,
    run_pipeline,
    train_in_one_piece,
)
from tests.harness.plain_gpt import STYLES, TinyConfig, load_logical, logical_weights
from tests.harness.threads import run_ranks

pytestmark = pytest.mark.threads

NUM_BLOCKS = 7
# (p, m, chunks)
SHAPES = [
    (1, 3, 2),
    (2, 1, 2),
    (2, 5, 2),
    (3, 4, 3),
    (3, 7, 2),
    (4, 2, 2),
    (4, 9, 2),
    (2, 6, 3),
    (4, 3, 1),
    (3, 5, 1),
    (2, 8, 1),
    (1, 2, 1),
]
CASES = [
    (name, p, m, chunks)
    for name in SCHEDULES
    for p, m, chunks in SHAPES
    if SCHEDULES[name].supports(chunks)
]


def even_cut(num_layers, num_stages):
    return tuple(num_layers * s // num_stages for s in range(num_stages + 1))


def test_each_schedule_is_tried_in_several_shapes():
    assert all(sum(case[0] == name for case in CASES) >= 3 for name in SCHEDULES)


@pytest.mark.parametrize("name, p, m, chunks", CASES)
def test_gradients_equal_those_of_one_process_to_the_last_bit(name, p, m, chunks):
    microbatches, home = make_batches(m), placement(name, p, chunks)
    losses, gradients = run_pipeline(
        SCHEDULES[name](p, m, chunks),
        even_cut(NUM_BLOCKS + 2, p * chunks),
        microbatches,
        home.__getitem__,
    )
    assert_equals_one_process(losses[home[-1]], gradients, microbatches, NUM_BLOCKS)


@pytest.mark.parametrize("name", SCHEDULES.names())
def test_sends_that_block_until_the_peer_receives_do_no_harm(name):
    chunks = next(chunks for chunks in (2, 1) if SCHEDULES[name].supports(chunks))
    microbatches, home, office = (
        make_batches(5),
        placement(name, 3, chunks),
        PostOffice(),
    )
    losses, gradients = run_pipeline(
        SCHEDULES[name](3, 5, chunks),
        even_cut(NUM_BLOCKS + 2, 3 * chunks),
        microbatches,
        home.__getitem__,
        partial(RendezvousChannels, office),
    )
    assert_equals_one_process(losses[home[-1]], gradients, microbatches, NUM_BLOCKS)


@pytest.mark.parametrize("name", SCHEDULES.names())
def test_steps_of_other_lengths_and_numbers_and_evaluations_between_them(name):
    chunks, p = next(chunks for chunks in (2, 1) if SCHEDULES[name].supports(chunks)), 2
    home, bounds = placement(name, p, chunks), even_cut(NUM_BLOCKS + 2, p * chunks)
    plan = lambda rank, m: lower(SCHEDULES[name](p, m, chunks), p * chunks)[rank]
    steps = [(3, 5), (1, 7), (4, 3), (3, 6)]  # (micro-batches, positions)

    def main(rank, world):
        layers = make_layers(NUM_BLOCKS)
        executor = make_executor(
            partial(plan, rank),
            layers,
            bounds,
            Channels(pipeline_group(world, rank)),
            home.__getitem__,
            rank,
            {Op.REDUCE: lambda stage: None},
        )
        trained, evaluated = [], []
        for m, length in steps:
            trained += executor.run(make_batches(m, length=length), SCALE)
            evaluated += executor.forward(make_batches(m + 1, length=length + 1))
        return (
            trained,
            evaluated,
            [[p.grad for p in layer.parameters()] for layer in layers],
        )

    results = run_ranks(p, main)
    layers, expected, evaluation = make_layers(NUM_BLOCKS), [], []
    for m, length in steps:
        expected += train_in_one_piece(layers, make_batches(m, length=length), SCALE)
        evaluation += train_in_one_piece(
            make_layers(NUM_BLOCKS), make_batches(m + 1, length=length + 1), SCALE
        )
    trained, evaluated, _ = results[home[-1]]
    assert all(
        torch.equal(loss.objective, theirs)
        for loss, theirs in zip(trained, expected, strict=True)
    )
    assert all(
        torch.equal(loss.objective, theirs)
        for loss, theirs in zip(evaluated, evaluation, strict=True)
    )
    for stage, rank in enumerate(home):
        for at in range(bounds[stage], bounds[stage + 1]):
            assert all(
                map(
                    torch.equal,
                    results[rank][2][at],
                    (p.grad for p in layers[at].parameters()),
                )
            )


def gpt_stage(config, tp, weights, bounds, index, recompute):
    layers = MODELS["gpt"](config, context_of(tp, recompute_granularity=recompute))[
        bounds[index] : bounds[index + 1]
    ]
    modules = build_stage(layers)
    load_logical(modules.parameters(), weights, tp)
    last = index == len(bounds) - 2
    loss = lambda x, batch: gpt_loss(x, batch, tp=tp, vocab_size=config.vocab_size)
    return Stage(
        index,
        list(modules),
        is_first=index == 0,
        is_last=last,
        loss=loss if last else None,
    )


@pytest.mark.parametrize(
    "name, style, recompute",
    [
        *((name, style, None) for name in SCHEDULES for style in STYLES),
        ("1f1b", "llama", "full"),
        ("zb-h1", "gpt2", "full"),
        ("zb-h1", "llama", "full"),
        ("zb-v", "gpt2", "full"),
        ("zb-v", "llama", "full"),
    ],
)
def test_a_gpt_whose_linears_defer_their_weights_has_the_gradients_of_one_process(
    name, style, recompute
):
    p, chunks, m = (
        2,
        next(chunks for chunks in (2, 1) if SCHEDULES[name].supports(chunks)),
        5,
    )
    config: TinyConfig = STYLES[style]
    weights, batches = (
        logical_weights(config, seed=1),
        [make_batch(config, b=2, seed=k) for k in range(m)],
    )
    home, bounds = (
        placement(name, p, chunks),
        even_cut(config.num_layers + 3, p * chunks),
    )
    lowered, tp = lower(SCHEDULES[name](p, m, chunks), p * chunks), solo("tp")

    def main(rank, world):
        stages = {
            s: gpt_stage(config, tp, weights, bounds, s, recompute)
            for s in stages_of(rank, home)
        }
        executor = Executor(
            lowered[rank],
            stages,
            Channels(pipeline_group(world, rank)),
            home.__getitem__,
            lambda batch: (batch.seq_length, batch.size, config.hidden_size),
            torch.float32,
            torch.device("cpu"),
            {Op.REDUCE: lambda stage: None},
        )
        losses = executor.run(batches, SCALE)
        return losses, {
            s: [
                (p.spec.name, p.grad)
                for module in stage.modules
                for p in module.parameters()
            ]
            for s, stage in stages.items()
        }

    results = run_ranks(p, main)
    whole = [
        list(gpt_stage(config, tp, weights, bounds, s, None).modules)
        for s in range(p * chunks)
    ]
    for batch, loss in zip(batches, results[home[-1]][0], strict=True):
        objective = gpt_loss(
            run_layers(sum(whole, []), None, batch),
            batch,
            tp=tp,
            vocab_size=config.vocab_size,
        ).objective
        (objective * SCALE).backward()
        assert torch.equal(objective, loss.objective)
    for stage, modules in enumerate(whole):
        found, expected = (
            results[home[stage]][1][stage],
            [p for module in modules for p in module.parameters()],
        )
        assert [name for name, _ in found] == [p.spec.name for p in expected]
        assert all(torch.equal(ours, p.grad) for (_, ours), p in zip(found, expected))
