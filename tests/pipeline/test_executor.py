"""The executor on threaded ranks: gradients are those of one process to the last bit, for any schedule, cut
and transport."""

import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from megatron_ds.errors import ScheduleError
from megatron_ds.mpu.channels import Channels
from megatron_ds.mpu.collectives import all_reduce_
from megatron_ds.pipeline.instruction import Instruction, Op
from megatron_ds.pipeline.passes import lower
from megatron_ds.pipeline.schedules import SCHEDULES
from megatron_ds.pipeline.simulate import simulate
from megatron_ds.pipeline.stage import Stage
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
    token_loss,
    train_in_one_piece,
)
from tests.harness.threads import ThreadWorld, run_ranks

pytestmark = pytest.mark.threads

CUTS = {
    1: (0, 5),
    2: (0, 1, 5),
    4: (0, 2, 3, 4, 5),
}  # of embedding, three blocks and head; uneven


# Other schedules, chunks and channels: test_pipeline_schedules.py.
@pytest.mark.parametrize("p, m", [(1, 2), (2, 1), (2, 5), (4, 3), (4, 8)])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_gradients_equal_those_of_one_process_to_the_last_bit(name, p, m):
    microbatches = make_batches(m)
    losses, gradients = run_pipeline(
        SCHEDULES[name](p, m), CUTS[p], microbatches, lambda stage: stage
    )
    assert losses[:-1] == [[]] * (p - 1)
    assert_equals_one_process(losses[-1], gradients, microbatches, num_blocks=3)


def test_receives_are_posted_before_the_computation_ahead_and_waited_for_only_when_needed():
    events = []

    class Recording:
        def announce(self, shapes, dtype):
            events.append(f"announce {len(shapes)}")

        def send(self, kind, destination, tensor):
            events.append(f"send {kind} to {destination}")

        def recv(self, kind, source, shape, dtype, device):
            events.append(f"post {kind} from {source}")
            return SimpleNamespace(
                wait=lambda: (
                    events.append(f"wait {kind}") or torch.zeros(shape, dtype=dtype)
                )
            )

        def drain(self):
            events.append("drain")

    class Telling(Stage):
        def forward(self, microbatch, *args):
            events.append(f"F{microbatch}")
            return super().forward(microbatch, *args)

        def backward(self, microbatch, grad):
            events.append(f"B{microbatch}")
            return super().backward(microbatch, grad)

    program = lower(SCHEDULES["1f1b"](3, 2), 3)[1]
    make_executor(
        program,
        make_layers(3),
        (0, 1, 3, 5),
        Recording(),
        lambda stage: stage,
        1,
        {Op.REDUCE: lambda stage: events.append("reduce")},
        Telling,
    ).run(make_batches(2))
    assert events == [
        "announce 2",
        "post act from 0",
        "post act from 0",
        "wait act",
        "F0",
        "send act to 2",
        "post grad from 2",
        "wait act",
        "F1",
        "send act to 2",
        "post grad from 2",
        "wait grad",
        "B0",
        "send grad to 0",
        "reduce",
        "wait grad",
        "B1",
        "send grad to 0",
        "drain",
    ]


def by_microbatch(home, m):
    """A schedule in the plainest order, for any placement of stages on ranks."""
    stages = range(len(home))
    order = [
        Instruction(op, s, k)
        for k in range(m)
        for op, run in ((Op.F, stages), (Op.B, reversed(stages)))
        for s in run
    ]
    return tuple(
        tuple(i for i in order if home[i.stage] == rank)
        for rank in range(max(home) + 1)
    )


@pytest.mark.parametrize("home", [(0, 0), (0, 1, 0, 1), (0, 1, 1, 0), (0, 0, 1, 1)])
def test_several_stages_on_a_rank_hand_over_without_a_transfer(home):
    microbatches = make_batches(3)
    bounds = (*range(len(home)), 5)
    losses, gradients = run_pipeline(
        by_microbatch(home, 3), bounds, microbatches, home.__getitem__
    )
    assert_equals_one_process(losses[home[-1]], gradients, microbatches, num_blocks=3)


def test_each_rank_keeps_as_many_microbatches_alive_as_the_simulator_says():
    class Counting(Stage):
        peak = 0

        def forward(self, *args):
            result = super().forward(*args)
            self.peak = max(self.peak, len(self.live))
            return result

    def main(rank, world, program):
        executor = make_executor(
            program[rank],
            make_layers(3),
            CUTS[4],
            Channels(pipeline_group(world, rank)),
            lambda stage: stage,
            rank,
            {Op.REDUCE: lambda stage: None},
            Counting,
        )
        executor.run(make_batches(6))
        return executor.stages[rank].peak

    for name, peaks in (("1f1b", [4, 3, 2, 1]), ("gpipe", [6, 6, 6, 6])):
        schedule = lower(SCHEDULES[name](4, 6), 4)
        assert list(simulate(schedule).peak_live) == peaks
        assert (
            run_ranks(4, lambda rank, world, s=schedule: main(rank, world, s)) == peaks
        )


def test_tied_gradients_are_summed_over_the_stages_that_hold_a_copy():
    microbatches, p = make_batches(3), 3
    schedule = lower(SCHEDULES["1f1b"](p, 3), p, tied=(0, p - 1))

    def main(rank, world):
        layers = make_layers(2)
        holder = {0: layers[0], p - 1: layers[-1]}
        ends = world.group("embd", (0, p - 1), rank) if rank in holder else None
        hooks = {
            Op.TIE: lambda stage: all_reduce_(holder[stage].weight.grad, ends),
            Op.REDUCE: lambda stage: None,
        }
        make_executor(
            schedule[rank],
            layers,
            (0, 1, 3, 4),
            Channels(pipeline_group(world, rank)),
            lambda stage: stage,
            rank,
            hooks,
        ).run(microbatches, SCALE)
        return holder[rank].weight.grad if rank in holder else None

    first, _, last = run_ranks(p, main)
    layers = make_layers(2)
    train_in_one_piece(layers, microbatches, SCALE)
    assert torch.equal(
        first, layers[0].weight.grad + layers[-1].weight.grad
    ) and torch.equal(first, last)


def test_evaluation_gives_the_losses_of_one_process_and_leaves_no_gradients():
    plan = lambda m: lower(SCHEDULES["1f1b"](2, m), 2)

    def main(rank, world):
        layers = make_layers(3)
        executor = make_executor(
            lambda m: plan(m)[rank],
            layers,
            CUTS[2],
            Channels(pipeline_group(world, rank)),
            lambda stage: stage,
            rank,
            {Op.REDUCE: lambda stage: None},
        )
        # the number may change from call to call
        results = [executor.forward(make_batches(m)) for m in (3, 1, 5)]
        assert not executor.stages[rank].live and all(
            p.grad is None for layer in layers for p in layer.parameters()
        )
        executor.run(make_batches(2))
        return results

    first, last = run_ranks(2, main)
    assert first == [[], [], []]
    for losses, m in zip(last, (3, 1, 5)):
        expected = train_in_one_piece(make_layers(3), make_batches(m), SCALE)
        assert all(
            torch.equal(ours.objective, theirs)
            for ours, theirs in zip(losses, expected, strict=True)
        )


def test_a_kept_loss_keeps_no_graph_alive():
    executor = alone(
        lower(SCHEDULES["gpipe"](1, 2), 1)[0], {Op.REDUCE: lambda stage: None}
    )
    assert all(
        loss.objective.grad_fn is None and not loss.objective.requires_grad
        for loss in executor.run(make_batches(2))
    )


def test_a_stage_frees_its_output_once_it_is_sent():
    storages = []

    class Shift(torch.nn.Module):  # an addition saves nothing for its backward
        def forward(self, x, batch):
            output = x + 1
            storages.append(weakref.ref(output.untyped_storage()))
            return output

    stage = Stage(1, [Shift()], is_first=False, is_last=False)
    sent = stage.forward(0, make_batches(1)[0], torch.zeros(3), 1.0)
    assert storages[0]() is not None
    del sent
    assert storages[0]() is None and stage.live
    assert torch.equal(stage.backward(0, torch.arange(3.0)), torch.arange(3.0))


def test_frozen_layers_before_the_first_trained_one_are_passed_by():
    layers = make_layers(1)
    layers[0].requires_grad_(False)
    stage = Stage(0, layers[:1], is_first=True, is_last=False)
    assert stage.forward(0, make_batches(1)[0], None, 1.0).shape == (5, 1, 6)
    assert stage.backward(0, torch.ones(5, 1, 6)) is None and not stage.live


def alone(program, hooks=None, layers=None, bounds=(0, 3)):
    """An executor without neighbours."""
    return make_executor(
        program,
        layers or make_layers(1),
        bounds,
        RendezvousChannels(PostOffice(), 0, ThreadWorld(1)),
        lambda stage: 0,
        0,
        hooks,
    )


F, B = Instruction(Op.F, 0, 0), Instruction(Op.B, 0, 0)


@pytest.mark.parametrize(
    "program, message",
    [
        (
            (Instruction(Op.GATHER, 0), F, B),
            "GATHER@0: this executor has no handler for GATHER. Handlers: F, B, I, W, SEND_ACT.*REDUCE, TIE",
        ),
        (
            (F, B, Instruction(Op.TIE, 0)),
            "TIE@0: this executor has no handler for TIE.*need a hook",
        ),
        ((F, B, Instruction(Op.F, 1, 0)), r"F0@1 is for stage 1.*Stages here: \[0\]"),
    ],
)
def test_a_program_that_cannot_be_executed_is_refused_before_it_starts(
    program, message
):
    with pytest.raises(ScheduleError, match=message):
        alone(program)


def test_another_number_of_microbatches_than_the_program_is_for_is_refused_with_the_right_one():
    executor = alone((F, B))
    for step in (executor.run, executor.forward):
        with pytest.raises(
            ScheduleError,
            match="received 3 micro-batches, but its program is for 1.*Pass 1",
        ):
            step(make_batches(3))
    with pytest.raises(
        ScheduleError, match="program for a step of 2 micro-batches computes 1"
    ):
        alone(lambda m: (F, B)).run(make_batches(2))


def test_a_forward_without_backward_is_noticed_at_the_end_of_the_step():
    with pytest.raises(
        AssertionError,
        match=r"stage 0: micro-batches \[0\] had a forward but no backward",
    ):
        alone((F,)).run(make_batches(1))


def test_an_error_says_where_the_pipeline_was_and_the_next_step_starts_clean():
    layers = make_layers(1)
    executor = alone(SCHEDULES["gpipe"](1, 3)[0], layers=layers)
    good, bad = make_batches(3), list(make_batches(3))
    bad[1] = replace(good[1], labels=None)
    with pytest.raises(AttributeError) as caught:
        executor.run(bad)
    place = (
        "pipeline rank 0 was executing F1@0 (forward of micro-batch 1 at stage 0) in a step of 3 "
        "micro-batches"
    )
    assert caught.value.__notes__ == [place]
    assert not executor.stages[0].live
    losses = executor.run(good, SCALE)
    reference = make_layers(1)
    assert all(
        map(
            torch.equal,
            (loss.objective for loss in losses),
            train_in_one_piece(reference, good, SCALE),
        )
    )
    assert torch.equal(layers[1].weight.grad, reference[1].weight.grad)


def test_a_last_stage_without_loss_returns_its_outputs():
    batch = make_batches(1)[0]
    layers = make_layers(1)
    executor = alone((F, B), layers=layers)
    executor.stages[0].loss = None
    (logits,) = executor.forward([batch])
    assert torch.equal(
        token_loss(logits, batch).objective, train_in_one_piece(layers, [batch], 1.0)[0]
    )
