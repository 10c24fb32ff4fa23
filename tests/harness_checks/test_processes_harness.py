"""The harness itself: errors of a rank arrive in the test, and the pool survives them."""

import os
import socket
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from megatron_ds.errors import LayoutError
from megatron_ds.mpu import collectives
from megatron_ds.mpu.rendezvous import Place, meet
from tests.harness import processes
from tests.harness.processes import run_processes

pytestmark = pytest.mark.processes


def summed(rank, world, scale):
    group = world.group("tp", range(world.size), rank)
    tensor = torch.full((3,), float(rank)) * scale
    collectives.all_reduce_(tensor, group)
    return tensor, os.getpid()


def refuse(rank, world):
    if rank == 1:
        raise LayoutError("seven does not divide")
    collectives.barrier(world.group("tp", range(world.size), rank))


def die(rank, world):
    if rank == 1:
        os._exit(17)
    collectives.barrier(world.group("tp", range(world.size), rank))


def linger(rank, world, folder):
    if rank == 0:
        (folder / "lingers").touch()
        time.sleep(3600)
    while not (folder / "lingers").exists():
        time.sleep(0.05)


@pytest.mark.quick
def test_processes_are_used_again_by_the_next_call():
    first = run_processes(2, summed, 2.0)
    second = run_processes(2, summed, 3.0)
    assert [tensor.tolist() for tensor, _ in first] == [[2.0] * 3] * 2
    assert [tensor.tolist() for tensor, _ in second] == [[3.0] * 3] * 2
    assert [pid for _, pid in first] == [pid for _, pid in second]


def test_the_error_of_a_rank_is_raised_in_the_test_with_the_rank_named():
    with pytest.raises(LayoutError, match="seven does not divide") as caught:
        run_processes(2, refuse, grace=1)
    assert "on rank 1 of 2" in caught.value.__notes__[0]


@pytest.mark.quick
def test_a_rank_that_dies_is_named_with_its_exit_code():
    with pytest.raises(RuntimeError, match="rank 1 of 2 died in die with exit code 17"):
        run_processes(2, die, grace=1)


def test_a_rank_that_hangs_is_named_with_its_stack(monkeypatch, tmp_path):
    """The time is over when all others have answered."""
    now, wait = [0.0], processes.wait

    def wait_for_others(connections, seconds):
        if len(connections) > 1:
            return wait(connections)
        now[0] += seconds
        return []

    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep)
    monkeypatch.setattr(processes, "time", clock)
    monkeypatch.setattr(processes, "wait", wait_for_others)
    with pytest.raises(
        TimeoutError, match=r"ranks \[0\] of 2 did not end within 5 s[\s\S]*in linger"
    ):
        run_processes(2, linger, tmp_path, timeout=5, joined=False)


def process_after_a_meeting(rank, world, port):
    """The number of this process. With a port, it still tries to meet a rank that never answers."""
    if port is not None and rank == 0:
        with pytest.raises(OSError, match="have not met"):
            meet("gloo", Place(("127.0.0.1", port), 1, 2), timedelta(seconds=1))
    return os.getpid()


def test_a_process_that_still_tries_to_meet_others_is_not_used_again():
    """It would meet the ranks of a later job, where the port is used again, and they would wait for it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        before = run_processes(2, process_after_a_meeting, port, joined=False)
    after = run_processes(2, process_after_a_meeting, None)
    assert before[0] not in after and before[1] in after
