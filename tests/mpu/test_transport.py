"""Groups over torch.distributed on real processes: every operation and dtype, failures, the mesh and its
getters."""

import os
import subprocess
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from megatron_ds.compat.deepspeed import getters
from megatron_ds.errors import CommunicationError
from megatron_ds.mpu import collectives
from megatron_ds.mpu import mesh as mesh_module
from megatron_ds.mpu.channels import Channels
from megatron_ds.mpu.grid import Grid
from megatron_ds.mpu.group import Group
from megatron_ds.mpu.mesh import Mesh
from tests.harness.limits import HUNG, VAIN
from tests.harness.processes import run_processes
from tests.harness.warm import warm_python

pytestmark = pytest.mark.processes

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
)


def all_operations(rank, world):
    """Small whole numbers, exact in every dtype."""
    n, group, results = world.size, world.group("tp", range(world.size), rank), {}
    for dtype in DTYPES:
        mine = (torch.arange(6) + 10 * rank).to(dtype)
        summed, largest, received = (
            mine.clone(),
            mine.clone(),
            torch.empty(2 * n, dtype=dtype),
        )
        collectives.all_reduce_(summed, group)
        collectives.all_reduce_(largest, group, "max")
        in_place = torch.zeros(n * 6, dtype=dtype)
        in_place[6 * rank : 6 * rank + 6] = mine
        collectives.all_gather_into_(
            in_place, in_place[6 * rank : 6 * rank + 6], group, async_op=True
        ).wait()
        keep = mine.clone()
        scattered = collectives.reduce_scatter(mine, group)
        assert torch.equal(mine, keep)
        collectives.all_to_all_(received, mine[: 2 * n], group)
        copied = mine.clone()
        collectives.broadcast_(copied, group, source=n - 1)
        results[dtype] = (summed, largest, in_place, scattered, received, copied)
    return results


@pytest.mark.quick
def test_every_operation_is_right_for_every_dtype():
    n = 3
    ranks = run_processes(n, all_operations)
    for dtype in DTYPES:
        given = torch.stack(
            [(torch.arange(6) + 10 * rank).to(dtype) for rank in range(n)]
        )
        for rank in range(n):
            summed, largest, in_place, scattered, received, copied = ranks[rank][dtype]
            assert torch.equal(summed, given.sum(0).to(dtype)), dtype
            assert torch.equal(largest, given[-1]) and torch.equal(copied, given[-1])
            assert torch.equal(in_place, given.flatten())
            assert torch.equal(
                scattered, given.sum(0).to(dtype)[2 * rank : 2 * rank + 2]
            )
            assert torch.equal(received, given[:, 2 * rank : 2 * rank + 2].flatten())


ROWS = [[0, 3, 1], [2, 0, 5], [0, 0, 4]]  # ROWS[i][j]: sent by rank i to rank j


def rows_of(rank, dtype):
    return (torch.arange(2 * sum(ROWS[rank])).view(-1, 2) + 100 * rank).to(dtype)


def pieces_of_any_size(rank, world):
    """By dtype: what an all-to-all with splits brought, and what came along a ring."""
    group, results = world.group("ep", range(world.size), rank), {}
    received = [rows[rank] for rows in ROWS]
    for dtype in DTYPES:
        out, passed = torch.empty(sum(received), 2, dtype=dtype), []
        work = collectives.all_to_all_(
            out, rows_of(rank, dtype), group, (ROWS[rank], received), async_op=True
        )
        held = torch.full((3,), rank, dtype=dtype)
        for _ in range(2):
            got = torch.empty(3, dtype=dtype)
            collectives.exchange(
                [(held, (rank + 1) % 3)], [(got, (rank - 1) % 3)], group
            )
            held = got
            passed.append(got)
        work.wait()
        results[dtype] = out, passed
    both = [
        torch.empty(1 << 18) for _ in range(2)
    ]  # both directions, more than a socket takes in one piece
    sends = [
        (torch.full((1 << 18,), 10.0 * rank + peer), peer)
        for peer in range(3)
        if peer != rank
    ]
    collectives.exchange(sends, [(t, peer) for t, (_, peer) in zip(both, sends)], group)
    return results, [t.unique().tolist() for t in both]


def test_an_all_to_all_of_unequal_pieces_and_an_exchange_are_right_for_every_dtype():
    for rank, (results, both) in enumerate(run_processes(3, pieces_of_any_size)):
        for dtype, (out, passed) in results.items():
            expected = torch.cat(
                [rows_of(i, dtype).split(ROWS[i])[rank] for i in range(3)]
            )
            assert torch.equal(out, expected), dtype
            assert [t.tolist() for t in passed] == [
                [(rank - 1) % 3] * 3,
                [(rank - 2) % 3] * 3,
            ]
        assert both == [[10.0 * peer + rank] for peer in range(3) if peer != rank]


def sums_of_reals(rank, world):
    """By size and dtype: (all-reduced, this rank's piece of the reduced, all ranks' numbers), all under way
    at once."""
    group, n, results, works = (
        world.group("dp", range(world.size), rank),
        world.size,
        {},
        [],
    )
    for dtype in (torch.float32, torch.bfloat16):
        for numel in (
            n,
            333 * n,
            20_001 * n,
        ):  # a number a piece; a message of one round; of two
            tensor = numbers(rank, numel, dtype)
            # the total is of no multiple of n
            total, piece = torch.cat((tensor, tensor[:1])), tensor.chunk(n)[rank]
            everybody = torch.empty(n * numel, dtype=dtype)
            works.append(
                collectives.all_gather_into_(
                    everybody, tensor.clone(), group, async_op=True
                )
            )
            works.append(collectives.all_reduce_(total, group, async_op=True))
            works.append(
                collectives.reduce_scatter_into_(piece, tensor, group, async_op=True)
            )  # in place
            results[dtype, numel] = total, piece, everybody
    for work in works:
        work.wait()
        work.wait()
    return results


def numbers(rank, numel, dtype):
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)


@pytest.mark.parametrize("n", [2, 3])
def test_sums_have_the_bits_of_adding_in_rank_order_on_all_ranks_in_both_operations_and_gathers_are_whole(
    n,
):
    ranks = run_processes(n, sums_of_reals)
    for (dtype, numel), (total, *_) in ranks[0].items():
        given = [numbers(rank, numel, dtype) for rank in range(n)]
        expected = given[0]
        for rank in range(1, n):
            expected = expected + given[rank]
        assert all(
            torch.equal(of_rank[dtype, numel][2], torch.cat(given)) for of_rank in ranks
        )
        assert total.numel() == numel + 1 and torch.equal(total[:numel], expected)
        assert all(torch.equal(of_rank[dtype, numel][0], total) for of_rank in ranks)
        assert torch.equal(
            torch.cat([of_rank[dtype, numel][1] for of_rank in ranks]), expected
        )


def talk_on_channels(rank, world):
    channels, other = Channels(world.group("pp", (0, 1), rank)), 1 - rank
    large = 1 << 18  # more than a socket takes in one piece
    posted = [
        channels.recv(kind, other, (large,), torch.bfloat16) for kind in ("act", "grad")
    ]
    for i in range(3):
        channels.send("grad", other, torch.full((large,), 10 + i, dtype=torch.bfloat16))
        channels.send("act", other, torch.full((large,), i, dtype=torch.bfloat16))
    got = {kind: [pending.wait()] for kind, pending in zip(("act", "grad"), posted)}
    for kind in ("act", "grad"):
        got[kind] += [
            channels.recv(kind, other, (large,), torch.bfloat16).wait()
            for _ in range(2)
        ]
    collectives.barrier(channels.group)
    deadline = time.monotonic() + HUNG
    while (
        channels.num_waiting and time.monotonic() < deadline
    ):  # sends are let go without anybody draining
        time.sleep(0.01)
    still_waiting = channels.num_waiting
    channels.drain()
    return {
        kind: [(t[0].item(), t[-1].item()) for t in got[kind]] for kind in got
    }, still_waiting


def test_channels_keep_their_order_and_let_go_of_what_has_arrived():
    for got, still_waiting in run_processes(2, talk_on_channels):
        assert got == {
            "act": [(0, 0), (1, 1), (2, 2)],
            "grad": [(10, 10), (11, 11), (12, 12)],
        }
        assert still_waiting == 0


def wait_in_vain(rank, world):
    from megatron_ds.mpu.process_groups import connect_torch

    pp, dp = (
        Group(
            axes,
            (0, 1),
            rank,
            connect_torch(axes, [(0, 1)], rank, timeout=timedelta(seconds=VAIN)),
        )
        for axes in ("pp", "dp")
    )
    messages = []
    for call in (
        (
            lambda: Channels(pp).recv("act", 0, (3,), torch.float32).wait(),
            lambda: collectives.all_reduce_(torch.zeros(3), dp),
        )
        if rank == 1
        else ()
    ):
        try:
            call()
        except CommunicationError as error:
            messages.append(str(error))
    return messages


def test_a_peer_that_never_comes_is_named_with_the_operation_and_the_group():
    receive, reduce = run_processes(2, wait_in_vain)[1]
    assert (
        "rank 1 (pipeline position 1) was waiting for an activation from rank 0 to rank 1"
        in receive
    )
    assert "rank 1: all-reduce failed in the dp group of ranks [0, 1]" in reduce


def look_around(rank, world):
    import torch.distributed as dist

    mesh = mesh_module.initialize_model_parallel(2, 2)
    group_ranks = lambda group: dist.get_process_group_ranks(group)
    seen = {
        "tp": group_ranks(getters.get_tensor_model_parallel_group()),
        "pp": group_ranks(getters.get_pipeline_model_parallel_group()),
        "dp": group_ranks(getters.get_data_parallel_group()),
        "model": group_ranks(getters.get_model_parallel_group()),
        "next": getters.get_pipeline_model_parallel_next_rank(),
        "first": getters.get_pipeline_model_parallel_first_rank(),
        "src": getters.get_tensor_model_parallel_src_rank(),
        "stage": (getters.is_pipeline_first_stage(), getters.is_pipeline_last_stage()),
        "sizes": (
            getters.get_model_parallel_world_size(),
            getters.get_data_parallel_world_size(),
        ),
        "place": (getters.get_model_parallel_rank(), getters.get_data_parallel_rank()),
    }
    alone = torch.ones(2)
    dist.all_reduce(alone, group=getters.get_data_parallel_group())
    total = torch.ones(1)
    collectives.all_reduce_(total, mesh.group("world"))
    mesh_module.destroy_model_parallel()
    return (
        seen,
        alone.tolist(),
        total.item(),
        mesh_module.model_parallel_is_initialized(),
    )


def test_the_getters_answer_as_megatron_does_for_tensor_2_pipeline_2():
    for rank, (seen, alone, total, still_there) in enumerate(
        run_processes(4, look_around)
    ):
        tensor, stage = rank % 2, rank // 2
        assert seen == {
            "tp": [2 * stage, 2 * stage + 1],
            "pp": [tensor, tensor + 2],
            "dp": [rank],
            "model": [0, 1, 2, 3],
            "next": tensor + 2 * (1 - stage),
            "first": tensor,
            "src": 2 * stage,
            "stage": (stage == 0, stage == 1),
            "sizes": (4, 1),
            "place": (rank, 0),
        }
        assert alone == [
            1.0,
            1.0,
        ]  # a group of one is not the world, which torch would take None for
        assert total == 4.0 and not still_there


def sums_over_axes(rank, world):
    mesh = Mesh(Grid(tp=2, dp=2), rank, world.connect)
    values = {}
    for axes in (("tp",), ("dp",), ("world",), ("ep",)):
        value = torch.tensor([10.0**rank])
        collectives.all_reduce_(value, mesh.group(*axes))
        values[axes[0]] = value.item()
    return values, sorted(op[1] for op in mesh.traffic.bytes)


def test_a_mesh_over_processes_sums_over_each_axis():
    for rank, (values, counted) in enumerate(run_processes(4, sums_over_axes)):
        t, d = rank % 2, rank // 2
        assert values == {
            "tp": 10.0 ** (2 * d) + 10.0 ** (2 * d + 1),
            "dp": 10.0**t + 10.0 ** (t + 2),
            "world": 1111.0,
            "ep": 10.0**rank,
        }
        assert counted == ["dp", "tp", "tp-cp-dp-pp"]


UNDER_TORCHRUN = """
import os
import torch
from megatron_ds import mpu
from megatron_ds.mpu import collectives
launch = mpu.read_launch()
mpu.start(launch)
mesh = mpu.initialize_model_parallel(tensor_model_parallel_size=2)
total = torch.tensor([launch.rank + 1.0])
collectives.all_reduce_(total, mesh.group("tp"))
assert total.item() == 3.0 and launch.source == "torchrun" and launch.local_world_size == 2
mpu.destroy_model_parallel()
mpu.stop()
os.write(1, f"done {launch.rank}\\n".encode())         # at once: lines of two ranks must not mix
"""


def plain_environment():
    return os.environ | {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }


def test_ranks_meet_under_torchrun(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(UNDER_TORCHRUN)
    command = [
        warm_python(),
        *"-m torch.distributed.run --standalone --nproc-per-node 2".split(),
        str(script),
    ]
    run = subprocess.run(
        command, env=plain_environment(), capture_output=True, text=True, timeout=HUNG
    )
    assert run.returncode == 0 and sorted(run.stdout.split()) == [
        "0",
        "1",
        "done",
        "done",
    ], run.stderr


ALONE = """
from datetime import timedelta
from megatron_ds import mpu
mpu.start(mpu.read_launch(), timedelta(seconds=2))
"""


def test_a_rank_that_finds_no_other_reports_the_address_without_the_backends_stack():
    env = plain_environment() | {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }
    run = subprocess.run(
        [warm_python(), "-c", ALONE],
        env=env,
        capture_output=True,
        text=True,
        timeout=HUNG,
    )
    assert (
        "CommunicationError: rank 1 of 2 (from torchrun) could not connect to the other ranks "
        "at 127.0.0.1:1"
    ) in run.stderr
    assert "no process listens there" in run.stderr and "frame #" not in run.stderr


def one_alone(rank, world):
    mesh = Mesh(Grid(), rank, world.connect)
    tensor = torch.ones(1)
    collectives.all_reduce_(tensor, mesh.group("world"))
    assert mesh.group("world").transport is None
    return tensor.tolist()


def test_a_world_of_one_process_needs_no_transport():
    assert run_processes(1, one_alone) == [[1.0]]
