"""Collectives of tensor- and context-parallel ranks of one host: through its memory, the bits of messages."""

import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from megatron_ds.errors import CommunicationError
from megatron_ds.mpu.launch import connect_torch
from tests.harness.processes import run_processes

TIMEOUT = 4.0
SIZES = (12, 3000, 999_996)                  # the last one in several rounds


def move_all(transport) -> list[torch.Tensor]:
    n, results = transport.size, []
    for i in range(5):
        for numel in SIZES:
            for dtype in (torch.bfloat16, torch.float32):
                random = torch.Generator().manual_seed(100 * i + transport.rank)
                mine = torch.randn(numel, generator=random).to(dtype)
                total, largest, piece = mine.clone(), mine.clone(), mine.new_empty(numel // n)
                whole, swapped = mine.new_empty(n * numel), torch.empty_like(mine)
                works = [transport.all_reduce(total, "sum"), transport.reduce_scatter(piece, mine, "sum"),
                         transport.all_gather(whole, mine), transport.all_to_all(swapped, mine),
                         transport.all_reduce(largest, "max")]
                for work in works:
                    work.wait()
                results += total, largest, piece, whole, swapped
    return results


def move_both(rank, world, axes):
    """(through memory, by messages, rounds of slots)"""
    ranks = [tuple(range(world.size))]
    shared, sent = connect_torch(axes, ranks, rank), connect_torch("dp", ranks, rank)
    assert sent._slots is None
    return move_all(shared), move_all(sent), shared._slots.rounds


@pytest.mark.parametrize("ranks, axes", [(2, "tp"), (3, "cp")])
def test_results_of_processes_have_the_bits_of_messages(ranks, axes):
    for shared, sent, rounds in run_processes(ranks, move_both, axes):
        assert rounds > len(shared)
        assert all(torch.equal(a, b) for a, b in zip(shared, sent, strict=True))


def reduce_with_one_gone(rank, world, folder, ends):
    transport = connect_torch("tp", [(0, 1)], rank, timeout=timedelta(seconds=TIMEOUT))
    tensor = torch.zeros(2000)
    transport.all_reduce(tensor, "sum").wait()
    if rank == 0:
        if ends:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1.5 * TIMEOUT)
        return
    with pytest.raises(CommunicationError) as raised:
        for _ in range(2):
            transport.all_reduce(tensor, "sum").wait()
    Path(folder, "error").write_text(str(raised.value))


@pytest.mark.parametrize("ends, why", [(True, "A peer exited"), (False, "A peer did not arrive in time")])
def test_a_rank_that_is_gone_is_an_error_with_the_group_and_the_operation(ends, why, tmp_path):
    try:
        run_processes(2, reduce_with_one_gone, str(tmp_path), ends)
    except Exception:       # noqa: BLE001  the process that ended
        assert ends
    message = (tmp_path / "error").read_text()
    assert message.startswith("rank 1: all-reduce failed in the tp group of ranks [0, 1]. ")
    assert why in message


def differ(rank, world):
    transport = connect_torch("cp", [(0, 1)], rank)
    tensor = torch.zeros(1000 + 1000 * rank)
    with pytest.raises(CommunicationError) as raised:
        transport.all_reduce(tensor, "sum").wait()
    return str(raised.value)


def test_ranks_with_different_tensors_are_an_error_of_the_group():
    for rank, message in enumerate(run_processes(2, differ)):
        assert message.startswith(f"rank {rank}: all-reduce failed in the cp group of ranks [0, 1]. ")
        assert f"rank {rank} expects {4000 * (rank + 1)}" in message
