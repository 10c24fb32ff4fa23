"""Signals and sums between processes of one host: the bits of messages, a rank that ends or never comes, and
a system that does not let one process open a pipe of another."""

import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from megatron_ds.errors import CommunicationError
from megatron_ds.host.signal_pipes import share_pipes
from megatron_ds.mpu.collectives import (
    all_reduce_,
    reduce_scatter_into_,
    settle,
    share_memory,
)
from megatron_ds.mpu.group import Group
from megatron_ds.mpu.process_groups import connect_torch
from tests.harness.limits import HUNG, VAIN
from tests.harness.processes import run_processes
from tests.harness.threads import run_ranks

pytestmark = pytest.mark.processes


def sum_both(rank, world):
    """(by shared memory, by messages): a piece of a sum and a whole one, twenty times in the same memory."""
    plain = world.group("dp-cp", tuple(range(world.size)), rank)
    group = share_memory(plain)
    tensor, results = group.memory.zeros(3000, torch.float32), []
    for i in range(20):
        given = torch.randn(
            3000, generator=torch.Generator().manual_seed(100 * i + rank)
        )
        for each in (group, plain):
            mine = tensor if each is group else torch.empty_like(tensor)
            piece = torch.empty(3000 // world.size)
            reduce_scatter_into_(piece, mine.copy_(given), each)
            settle(each)
            all_reduce_(mine.copy_(given), each)
            results.append((piece, mine.clone()))
    return results[::2], results[1::2], group.sums.rounds


@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_of_processes_have_the_bits_of_messages(ranks):
    for shared, sent, rounds in run_processes(ranks, sum_both):
        assert rounds == 60
        assert all(
            torch.equal(a, b)
            for pair, other in zip(shared, sent)
            for a, b in zip(pair, other)
        )


def sum_with_one_gone(rank, world, folder, ends):
    ranks = (1, 2)
    transport = connect_torch("dp", [ranks], rank, timeout=timedelta(seconds=VAIN))
    if rank == 0:
        return
    group = share_memory(Group("dp", ranks, ranks.index(rank), transport))
    tensor = group.memory.zeros(2000, torch.float32)
    all_reduce_(tensor, group)
    if rank == 1:
        if ends:
            os.kill(os.getpid(), signal.SIGKILL)
        while not Path(folder, "error").exists():
            time.sleep(0.05)
        return
    with pytest.raises(CommunicationError) as raised:
        all_reduce_(tensor, group)
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
        run_processes(3, sum_with_one_gone, str(tmp_path), ends, grace=HUNG)
    except Exception:  # noqa: BLE001  the process that ended
        assert ends
    message = (tmp_path / "error").read_text()
    assert message.startswith(
        "rank 2: a reduction in shared memory failed in the dp group of ranks [1, 2]. "
    )
    assert why in message and message.endswith(cause)


def test_where_pipes_cannot_be_opened_all_ranks_send_messages(monkeypatch, caplog):
    opens = os.open

    def refuse(path, *args, **kwargs):
        if str(path).startswith("/proc/"):
            raise PermissionError(13, "Permission denied")
        return opens(path, *args, **kwargs)

    files = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "open", refuse)
    exchange = lambda rank, world: (
        world.group("dp", (0, 1), rank).transport.all_gather_object
    )
    share = lambda rank, world: share_pipes(rank, (0, 1), exchange(rank, world), VAIN)
    assert run_ranks(2, share) == [None, None]
    (line,) = caplog.messages
    assert (
        "send tensors as messages" in line and "may not open a pipe of process" in line
    )
    monkeypatch.undo()
    assert len(os.listdir("/proc/self/fd")) == files
