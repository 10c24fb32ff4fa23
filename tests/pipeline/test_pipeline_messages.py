"""Ranks of a pipeline that mean different tensors: an error that names who, which micro-batch, expected and
got."""

from dataclasses import replace

import pytest
import torch

from megatron_ds.errors import CommunicationError
from megatron_ds.mpu.channels import Channels
from megatron_ds.pipeline.instruction import Op
from megatron_ds.pipeline.passes import lower
from megatron_ds.pipeline.schedules import SCHEDULES
from tests.harness.pipelines import (
    make_batches,
    make_executor,
    make_layers,
    pipeline_group,
)
from tests.harness.threads import run_ranks

pytestmark = pytest.mark.threads


def run_two(change, changed_rank, p=2):
    """One step on threads in which `change(executor)` was done to one rank; each rank's error, or None."""
    schedule = lower(SCHEDULES["1f1b"](p, 3), p)

    def main(rank, world):
        executor = make_executor(
            schedule[rank],
            make_layers(p),
            (0, *range(2, p + 1), p + 2),
            Channels(pipeline_group(world, rank)),
            lambda stage: stage,
            rank,
            {Op.REDUCE: lambda stage: None},
        )
        batches = list(make_batches(3))
        if rank == changed_rank:
            change(executor, batches)
        executor.run(batches)

    with pytest.raises(CommunicationError) as caught:
        run_ranks(p, main)
    return str(caught.value)


def shorten(executor, batches):
    batches[1] = replace(
        batches[1],
        tokens=batches[1].tokens[:, :3],
        labels=batches[1].labels[:, :3],
        loss_mask=batches[1].loss_mask[:, :3],
        position_ids=batches[1].position_ids[:, :3],
    )


def test_a_receiver_that_expects_another_shape_says_who_sends_what():
    story = run_two(shorten, changed_rank=1)
    assert (
        "rank 1 (pipeline position 1) receives an activation from rank 0 (position 0), but the shapes of "
        "their steps differ" in story
    )
    assert (
        "micro-batch 1 was expected as [3, 2, 6] float32, but the sender has [5, 2, 6] float32"
        in story
    )
    assert (
        "pipeline rank 1 was executing F0@1 (forward of micro-batch 0 at stage 1) "
        "in a step of 3 micro-batches"
    ) in story


def test_a_receiver_of_another_dtype_says_so_before_any_garbage():
    def widen(executor, batches):
        executor.dtype = torch.float64

    story = run_two(widen, changed_rank=1)
    assert (
        "micro-batch 0 was expected as [5, 2, 6] float64, but the sender has [5, 2, 6] float32"
        in story
    )


def test_ranks_with_other_numbers_of_micro_batches_find_out():
    def shrink(executor, batches):
        executor._compile(lower(SCHEDULES["1f1b"](2, 2), 2)[1], 2)
        batches.pop()

    story = run_two(shrink, changed_rank=1)
    assert "differ: this rank's step has 2 micro-batches, the sender's has 3" in story


@pytest.mark.parametrize(
    "change, words",
    [
        (
            lambda x: x.bfloat16(),
            r"computed [5, 2, 6] bfloat16 for micro-batch 0, but stage 1 on pipeline rank 1 expects "
            r"[5, 2, 6] float32",
        ),
        (
            lambda x: x[1:],
            "computed [4, 2, 6] float32 for micro-batch 0, but stage 1 on pipeline rank 1 expects [5, 2, 6]",
        ),
    ],
)
def test_a_stage_that_makes_something_else_than_the_next_expects_does_not_send_it(
    change, words
):
    def spoil(executor, batches):
        layer = executor.stages[0].modules[-1]
        forward = layer.forward
        layer.forward = lambda x, batch: change(forward(x, batch))

    story = run_two(spoil, changed_rank=0)
    assert f"stage 0 on pipeline rank 0 {words}" in story and "F0@0" in story


def test_a_message_is_never_taken_for_one_of_another_shape():
    """Without the shape check: the channel alone."""

    def talk(rank, world):
        channels = Channels(pipeline_group(world, rank))
        if rank == 0:
            channels.send("act", 1, torch.zeros(4))
            channels.send("act", 1, torch.ones(3))
            return None
        return channels.recv("act", 0, (3,), torch.float32).wait()

    assert torch.equal(run_ranks(2, talk)[1], torch.ones(3))


def test_the_shape_check_is_not_counted_as_traffic_and_is_sent_once_a_step():
    def talk(rank, world):
        group = pipeline_group(world, rank)
        channels, sent = Channels(group), []
        isend = group.transport.isend
        group.transport.isend = lambda tensor, *where: (
            sent.append(tensor.dtype) or isend(tensor, *where)
        )
        for _ in range(2):
            channels.announce([(4,)] * 3, torch.float32)
            for kind in ("act", "grad", "act"):
                if rank == 0:
                    channels.send(kind, 1, torch.zeros(4))
                else:
                    channels.recv(kind, 0, (4,), torch.float32).wait()
        return dict(group.traffic.bytes), sent.count(torch.int64), len(sent)

    assert run_ranks(2, talk)[0] == ({("send", "pp", 2): 96}, 2, 8)
