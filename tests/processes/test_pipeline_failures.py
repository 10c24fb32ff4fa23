"""Pipelines of real processes in which one rank goes wrong: every other one ends, and says what it waited for."""

import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest

from megatron_ds.errors import CommunicationError
from megatron_ds.mpu.channels import Channels
from megatron_ds.mpu.group import Group
from megatron_ds.mpu.transport import connect_torch
from megatron_ds.pipeline.instruction import Op
from megatron_ds.pipeline.passes import lower
from megatron_ds.pipeline.placement import placement
from megatron_ds.pipeline.schedules import SCHEDULES
from tests.harness.pipelines import make_batches, make_executor, make_layers
from tests.harness.processes import run_processes

P, M, TIMEOUT = 3, 5, 2.0


def run_a_step(rank, name, chunks, before_forward, batches):
    """One step; what the rank says at its end, and the seconds that took."""
    ranks, stages = tuple(range(P)), P * chunks
    group = Group("pp", ranks, rank, connect_torch("pp", [ranks], rank, timeout=timedelta(seconds=TIMEOUT)))
    bounds = (0, *range(2, stages + 1), stages + 2)
    executor = make_executor(lower(SCHEDULES[name](P, M, chunks), stages)[rank], make_layers(stages), bounds, Channels(group),
                             placement(name, P, chunks).__getitem__, rank, {Op.REDUCE: lambda stage: None})
    for stage in executor.stages.values():
        forward = stage.forward
        stage.forward = lambda k, *args, forward=forward: (before_forward(k), forward(k, *args))[1]
    start = time.monotonic()
    try:
        executor.run(batches)
    except CommunicationError as error:
        return str(error), time.monotonic() - start
    return "done", time.monotonic() - start


def die_midway(rank, world, folder, name, chunks):
    def before_forward(k):
        if rank == 1 and k == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    story, _ = run_a_step(rank, name, chunks, before_forward, make_batches(M))
    Path(folder, str(rank)).write_text(story)


def assert_it_says_where_it_waited(story, rank):
    assert f"pipeline rank {rank} was at " in story and f"out of a step of {M} micro-batches" in story
    assert f"rank {rank} (pipeline position {rank}) was " in story
    assert any(f"of micro-batch {k} at stage " in story for k in range(M)), story


@pytest.mark.parametrize("name, chunks", [("1f1b", 1), ("zb-v", 2)])
def test_when_a_rank_is_killed_all_others_say_what_they_waited_for(tmp_path, name, chunks):
    with pytest.raises(RuntimeError, match="rank 1 of 3 died"):
        run_processes(P, die_midway, str(tmp_path), name, chunks)
    for rank in (0, 2):
        story = (tmp_path / str(rank)).read_text()
        assert_it_says_where_it_waited(story, rank)
        assert "A peer ended" in story or "was never received" in story or "Look for the first error" in story, story


def fall_asleep(rank, world, name, chunks):
    def before_forward(k):
        if rank == 1 and k == 3:
            time.sleep(2 * TIMEOUT)

    return run_a_step(rank, name, chunks, before_forward, make_batches(M))


@pytest.mark.parametrize("name, chunks", [("1f1b", 1), ("zb-v", 2)])
def test_when_a_rank_sleeps_no_other_waits_for_ever(name, chunks):
    results = run_processes(P, fall_asleep, name, chunks)
    for rank in (0, 2):
        story, seconds = results[rank]
        assert_it_says_where_it_waited(story, rank)
        assert seconds < 3 * TIMEOUT
    assert any("A peer never came" in story for story, _ in results)


def mean_other_tensors(rank, world, longer):
    """Rank 1 has a longer sequence than the others, or a shorter one."""
    return run_a_step(rank, "1f1b", 1, lambda k: None, make_batches(M, length=(7 if longer else 3) if rank == 1 else 5))


@pytest.mark.parametrize("longer", [False, True])
def test_ranks_that_mean_other_shapes_find_out_at_once_and_nobody_computes_with_garbage(longer):
    results = run_processes(P, mean_other_tensors, longer)
    length = 7 if longer else 3
    assert f"micro-batch 0 was expected as [{length}, 2, 6] float32, but comes as [5, 2, 6] float32" in results[1][0]
    assert "rank 1 (pipeline position 1) and rank 0 (position 0), which sends an activation to it" in results[1][0]
    assert results[1][1] < TIMEOUT
    assert all(story != "done" for story, _ in results)
