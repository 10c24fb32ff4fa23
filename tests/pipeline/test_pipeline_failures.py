"""Pipelines of real processes in which one rank goes wrong: every other one ends, and says what it waited
for."""

import os
import platform
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from megatron_ds.errors import CommunicationError
from megatron_ds.mpu.channels import Channels
from megatron_ds.mpu.collectives import all_reduce_
from megatron_ds.mpu.group import Group
from megatron_ds.mpu.process_groups import connect_torch
from megatron_ds.mpu.stuck_ranks import register_host
from megatron_ds.pipeline.instruction import Op
from megatron_ds.pipeline.passes import lower
from megatron_ds.pipeline.schedules import SCHEDULES, placement
from tests.harness.limits import HUNG, VAIN
from tests.harness.pipelines import make_batches, make_executor, make_layers
from tests.harness.processes import run_processes

pytestmark = pytest.mark.processes

P, M = 3, 5


def run_a_step(rank, name, chunks, before_forward, batches):
    """One step; the error that the rank ends with, or "done"."""
    ranks, stages = tuple(range(P)), P * chunks
    group = Group(
        "pp",
        ranks,
        rank,
        connect_torch("pp", [ranks], rank, timeout=timedelta(seconds=VAIN)),
    )
    bounds = (0, *range(2, stages + 1), stages + 2)
    executor = make_executor(
        lower(SCHEDULES[name](P, M, chunks), stages)[rank],
        make_layers(stages),
        bounds,
        Channels(group),
        placement(name, P, chunks).__getitem__,
        rank,
        {Op.REDUCE: lambda stage: None},
    )
    for stage in executor.stages.values():
        forward = stage.forward
        stage.forward = lambda k, *args, forward=forward: (
            before_forward(k),
            forward(k, *args),
        )[1]
    try:
        executor.run(batches)
    except CommunicationError as error:
        return str(error)
    return "done"


def die_midway(rank, world, folder, name, chunks):
    def before_forward(k):
        if rank == 1 and k == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    story = run_a_step(rank, name, chunks, before_forward, make_batches(M))
    Path(folder, str(rank)).write_text(story)


def assert_it_says_where_it_waited(story, rank):
    assert (
        f"pipeline rank {rank} was executing " in story
        and f"in a step of {M} micro-batches" in story
    )
    assert f"rank {rank} (pipeline position {rank}) was " in story
    assert any(f"of micro-batch {k} at stage " in story for k in range(M)), story


@pytest.mark.parametrize("name, chunks", [("1f1b", 1), ("zb-v", 2)])
def test_when_a_rank_is_killed_all_others_say_what_they_waited_for(
    tmp_path, name, chunks
):
    with pytest.raises(RuntimeError, match="rank 1 of 3 died"):
        run_processes(P, die_midway, str(tmp_path), name, chunks, grace=HUNG)
    for rank in (0, 2):
        story = (tmp_path / str(rank)).read_text()
        assert_it_says_where_it_waited(story, rank)
        assert (
            "A peer exited" in story
            or "was never received" in story
            or "Look for the earliest error" in story
        ), story


def fall_asleep(rank, world, folder, name, chunks):
    def before_forward(k):
        while (
            rank == 1
            and k == 3
            and not all((folder / str(other)).exists() for other in (0, 2))
        ):
            time.sleep(0.05)

    story = run_a_step(rank, name, chunks, before_forward, make_batches(M))
    (folder / str(rank)).touch()
    return story


@pytest.mark.parametrize(
    "name, chunks", [pytest.param("1f1b", 1, marks=pytest.mark.all), ("zb-v", 2)]
)
def test_when_a_rank_sleeps_the_others_end_and_name_it(tmp_path, name, chunks):
    stories = run_processes(P, fall_asleep, tmp_path, name, chunks)
    for rank in (0, 2):
        assert_it_says_where_it_waited(stories[rank], rank)
    assert any(
        "A peer did not arrive in time" in story and "rank 1 is stuck" in story
        for story in stories
    )


def wait_for_rank_2(rank, world, folder):
    """Rank 2 does nothing. Rank 3 waits for it in an all-reduce, rank 1 for rank 3, rank 0 for rank 2, as in
    TP 2 × PP 2."""
    tp, pp = (
        connect_torch(axes, ranks, rank, timeout=timedelta(seconds=VAIN))
        for axes, ranks in (("tp", [(0, 1), (2, 3)]), ("pp", [(0, 2), (1, 3)]))
    )
    register_host()
    if rank == 2:
        while not all((folder / str(other)).exists() for other in (0, 1, 3)):
            time.sleep(0.05)
        return "slept"
    try:
        if rank == 3:
            all_reduce_(torch.ones(3), Group("tp", (2, 3), 1, tp))
        else:
            Channels(Group("pp", (rank, rank + 2), 0, pp)).recv(
                "act", 1, (3,), torch.float32
            ).wait()
    except CommunicationError as error:
        (folder / str(rank)).touch()
        return str(error)


def test_the_stuck_rank_is_named_by_ranks_that_wait_for_others(tmp_path):
    stories = run_processes(4, wait_for_rank_2, tmp_path)
    for rank in (0, 1, 3):
        assert (
            "Of 4 ranks, all but 1 report that they waited; "
            f"rank 2 (host {platform.node()}) is stuck"
        ) in stories[rank]


def mean_other_tensors(rank, world, longer):
    """Rank 1 has a longer sequence than the others, or a shorter one."""
    length = 5
    if rank == 1:
        length = 7 if longer else 3
    batches = make_batches(M, length=length)
    return run_a_step(rank, "1f1b", 1, lambda k: None, batches)


@pytest.mark.parametrize("longer", [False, True])
def test_ranks_that_mean_other_shapes_find_out_at_once_and_nobody_computes_with_garbage(
    longer,
):
    results = run_processes(P, mean_other_tensors, longer)
    length = 7 if longer else 3
    assert (
        f"micro-batch 0 was expected as [{length}, 2, 6] float32, "
        "but the sender has [5, 2, 6] float32"
    ) in results[1]
    assert (
        "rank 1 (pipeline position 1) receives an activation from rank 0 (position 0)"
        in results[1]
    )
    assert "did not arrive in time" not in results[1]
    assert "done" not in results
