"""Collectives of tensor- and context-parallel ranks of one host: through its memory, the bits of messages."""

import gc
import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from megatron_ds.errors import CommunicationError
from megatron_ds.mpu.grid import Grid
from megatron_ds.mpu.mesh import Mesh
from megatron_ds.mpu.process_groups import connect_torch
from tests.harness.limits import HUNG, VAIN
from tests.harness.processes import run_processes

pytestmark = pytest.mark.processes

SIZES = (12, 3000, 999_996)  # the last one in several rounds


def move_all(transport) -> list[torch.Tensor]:
    n, results = transport.size, []
    for i in range(5):
        for numel in SIZES:
            for dtype in (torch.bfloat16, torch.float32):
                random = torch.Generator().manual_seed(100 * i + transport.rank)
                mine = torch.randn(numel, generator=random).to(dtype)
                total, largest, piece = (
                    mine.clone(),
                    mine.clone(),
                    mine.new_empty(numel // n),
                )
                whole, swapped = mine.new_empty(n * numel), torch.empty_like(mine)
                works = [
                    transport.all_reduce(total, "sum"),
                    transport.reduce_scatter(piece, mine, "sum"),
                    transport.all_gather(whole, mine),
                    transport.all_to_all(swapped, mine),
                    transport.all_reduce(largest, "max"),
                ]
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


@pytest.mark.quick
@pytest.mark.parametrize("ranks, axes", [(2, "tp"), (3, "cp")])
def test_results_of_processes_have_the_bits_of_messages(ranks, axes):
    for shared, sent, rounds in run_processes(ranks, move_both, axes):
        assert rounds > len(shared)
        assert all(torch.equal(a, b) for a, b in zip(shared, sent, strict=True))


def slots_of(rank, world, grid):
    """Whether the ranks of each axis pass tensors through memory, where the world is connected before them."""
    mesh = Mesh(grid, rank, connect_torch)
    groups = [mesh.group(axes) for axes in ("world", "tp", "dp")]
    return [group.size > 1 and group.transport._slots is not None for group in groups]


@pytest.mark.parametrize(
    "grid, expected",
    [(Grid(tp=2), [False, True, False]), (Grid(dp=2), [False, False, False])],
)
def test_ranks_that_are_the_whole_world_pass_activations_through_memory(grid, expected):
    assert run_processes(2, slots_of, grid) == [expected] * 2


def reduce_with_one_gone(rank, world, folder, ends):
    transport = connect_torch("tp", [(1, 2)], rank, timeout=timedelta(seconds=VAIN))
    if rank == 0:
        return
    tensor = torch.zeros(2000)
    transport.all_reduce(tensor, "sum").wait()
    if rank == 1:
        if ends:
            os.kill(os.getpid(), signal.SIGKILL)
        while not Path(folder, "error").exists():
            time.sleep(0.05)
        return
    with pytest.raises(CommunicationError) as raised:
        for _ in range(2):
            transport.all_reduce(tensor, "sum").wait()
    Path(folder, "error").write_text(str(raised.value))


@pytest.mark.parametrize(
    "ends, why, cause",
    [
        (True, "A peer exited", "connection closed by peer, rank 1"),
        (
            False,
            "A peer did not arrive in time",
            f"timed out after {VAIN:g} s without a signal of rank 1",
        ),
    ],
)
def test_a_rank_that_is_gone_is_an_error_with_the_group_and_the_operation(
    ends, why, cause, tmp_path
):
    try:
        run_processes(3, reduce_with_one_gone, str(tmp_path), ends, grace=HUNG)
    except Exception:  # noqa: BLE001  the process that ended
        assert ends
    message = (tmp_path / "error").read_text()
    assert message.startswith(
        "rank 2: all-reduce failed in the tp group of ranks [1, 2]. "
    )
    assert why in message and message.endswith(cause)


def differ(rank, world):
    transport = connect_torch("cp", [(1, 2)], rank)
    if rank == 0:
        return None
    tensor = torch.zeros(1000 * rank)
    with pytest.raises(CommunicationError) as raised:
        transport.all_reduce(tensor, "sum").wait()
    return str(raised.value)


def test_ranks_with_different_tensors_are_an_error_of_the_group():
    _, *messages = run_processes(3, differ)
    for rank, message in enumerate(messages, start=1):
        assert message.startswith(
            f"rank {rank}: all-reduce failed in the cp group of ranks [1, 2]. "
        )
        assert f"rank {3 - rank} has {4000 * (3 - rank)} bytes" in message
        assert f"rank {rank} expects {4000 * rank}" in message


def close_without_collector(rank, world):
    """Open pipes and files in memory before slots, with them, and after their transport is closed."""
    gc.disable()
    opened = lambda: sum("pipe:" in link or "memfd:" in link for link in links())
    before = opened()
    transport = connect_torch("tp", [(0, 1)], rank)
    transport.all_reduce(torch.zeros(2000), "sum").wait()
    between = opened()
    transport.barrier()
    transport.close()
    return before, between, opened()


def links() -> list[str]:
    paths = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
    return [os.readlink(path) for path in paths if os.path.lexists(path)]


def test_closing_a_transport_closes_pipes_and_files_at_once():
    for before, between, after in run_processes(2, close_without_collector):
        assert between == before + 4 and after == before  # two pipe ends and two files
