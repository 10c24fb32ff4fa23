"""Ranks of which one ends before it joins, or has another world size or a number twice: all end, with the reason.

The timeout is three minutes, so that a rank which waited for it would fail the test.
"""

import os
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import megatron_ds
from tests.harness import pretraining
from tests.harness.limits import HUNG
from tests.harness.pretraining import MOCK
from tests.harness.processes import run_processes, stop_processes
from tests.harness.warm import warm_python
from tools.free_port import free_port

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _processes_of_their_own():
    """A rank that could not meet the others may keep a thread that reports to them."""
    yield
    stop_processes()


def _process(at, world, port, ranks, sizes, commands):
    launched = SimpleNamespace(size=sizes[at])
    return pretraining._rank(ranks[at], launched, port, commands[at], None)


def run_jobs(ranks, sizes, *extra):
    """How each process ended. ranks, sizes: RANK and WORLD_SIZE of each; extra: the flags of each."""
    commands = [[*MOCK, *map(str, flags)] for flags in extra or [[]] * len(ranks)]
    return run_processes(
        len(ranks), _process, free_port(), ranks, sizes, commands, joined=False
    )


def assert_sizes_named(text, *sizes):
    """sizes: (world size, rank) in either order"""
    assert "he world size is " in text
    assert all(f"{size} for rank {rank} on " in text for size, rank in sizes), text


def test_ranks_with_different_world_sizes():
    flags = ["--global-batch-size", "12"]
    ended = run_jobs([0, 1, 2], [3, 3, 4], flags, flags, flags)
    assert [rank.code for rank in ended] == [2, 2, 2]
    for rank in ended:
        assert "4 for rank 2 on " in rank.err and "3 for rank " in rank.err


def test_a_world_size_by_which_the_batch_does_not_divide():
    """The rank with the wrong size ends by a rule of the configuration; the others name the sizes, too."""
    ended = run_jobs([0, 1], [2, 3])
    assert [rank.code for rank in ended] == [2, 2]
    assert "--global-batch-size 4 is not a multiple of" in ended[0].err
    assert_sizes_named(ended[0].err, (2, 0), (3, 1))


def test_a_job_of_two_that_rank_0_takes_for_one_of_four():
    for ended in run_jobs([0, 1], [4, 2]):
        assert ended.code == 2
        assert_sizes_named(ended.err, (4, 0), (2, 1))


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize(
    "flags, words",
    [
        (["--num-layer", "2"], "unknown flag --num-layer"),
        (["--config", "nowhere/run.yaml"], "--config nowhere/run.yaml: no such file"),
    ],
)
def test_a_rank_that_ends_by_its_own_options(failing, flags, words):
    ended = run_jobs([0, 1], [2, 2], *([flags, []] if failing == 0 else [[], flags]))
    assert [rank.code for rank in ended] == [2, 2]
    own, other = ended[failing].err, ended[1 - failing].err
    # a rank other than 0 leaves it to rank 0 to print its error
    assert (words in own) == (failing == 0) and "ended before it joined" not in own
    assert f"rank {failing} on " in other
    assert f"ended before it joined the other ranks: {words}" in other
    assert len(other.splitlines()) == 1


def test_two_processes_with_one_rank():
    flags = ["--global-batch-size", "3"]
    for ended in run_jobs([0, 1, 1], [3, 3, 3], flags, flags, flags):
        assert ended.code == 2 and "two processes have RANK 1 of 3: " in ended.err


def test_two_processes_with_rank_0():
    for ended in run_jobs([0, 0], [2, 2]):
        assert ended.code == 2 and "two processes have RANK 0 of 2: " in ended.err


def test_a_process_that_comes_after_all_ranks_have_met_ends_alone(tmp_path):
    port, saved = free_port(), tmp_path / "run"
    flags = [*MOCK, "--train-iters", "100000", "--save", saved, "--exit-signal-handler"]
    environment = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
    }

    def start(rank):
        command = [warm_python(), "pretrain_gpt.py", *map(str, flags)]
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment | {"RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    ranks = [start("0"), start("1")]
    try:
        for line in ranks[0].stdout:
            if "iteration        1/" in line:
                break
        late = start("1")
        _, errors = late.communicate(timeout=HUNG)
        assert late.returncode == 2
        assert "came after all ranks had met, among them rank " in errors
        assert [rank.poll() for rank in ranks] == [None, None]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


PROGRAM = """
import os, sys
import torch, megatron_ds as deepspeed
for meeting in range(2):
    deepspeed.init_distributed()
    counts = torch.ones(1)
    torch.distributed.all_reduce(counts)
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    if torch.distributed.get_rank() == 0:
        print("attempt", attempt, "meeting", meeting, "ranks", int(counts), flush=True)
    torch.distributed.barrier()
    deepspeed.comm.destroy_process_group()
    if attempt == "0" and meeting == 1:
        sys.exit(3)
"""


def wait_for(file):
    while not file.exists():
        time.sleep(0.05)


def meet_twice(rank, world, port, folder):
    """The sums of two meetings at one address."""
    environment = {
        "RANK": rank,
        "WORLD_SIZE": world.size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    os.environ.update({name: str(value) for name, value in environment.items()})
    found = []
    for meeting in range(2):
        megatron_ds.init_distributed()
        counts = torch.ones(1)
        dist.all_reduce(counts)
        found.append(counts.item())
        if rank == 0:  # it has the store, and leaves last
            wait_for(folder / f"1 has left {meeting}")
        megatron_ds.comm.destroy_process_group()
        (folder / f"{rank} has left {meeting}").touch()
        if rank:
            wait_for(folder / f"0 has left {meeting}")
    return found


def test_the_same_processes_meet_again(tmp_path):
    found = run_processes(2, meet_twice, free_port(), tmp_path, joined=False)
    assert found == [[2.0] * 2] * 2


def test_under_torchrun_ranks_meet_again_in_the_same_store(tmp_path):
    """The agent's store outlives process groups and, in one attempt after the other, processes."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [warm_python(), "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    command += ["--max-restarts", "1", str(program)]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=HUNG,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    expected = [
        f"attempt {attempt} meeting {meeting} ranks 2"
        for attempt in (0, 1)
        for meeting in (0, 1)
    ]
    assert done.stdout.splitlines() == expected, done.stderr[-3000:]
