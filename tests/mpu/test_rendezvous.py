"""Ranks that cannot meet end within the timeout, with the reason and without stack frames of C++."""

import os
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from datetime import timedelta

import pytest

import megatron_ds
from megatron_ds.errors import CommunicationError
from megatron_ds.mpu.rendezvous import wait_for_listener
from tests.harness.limits import HUNG
from tests.harness.processes import run_processes, stop_processes
from tests.harness.warm import warm_python

pytestmark = pytest.mark.processes

SECONDS = 3


@pytest.fixture(autouse=True)
def _processes_of_their_own():
    """A rank that could not join keeps a thread of torch that still tries, and the variables of a launcher:
    ranks of later tests start anew."""
    yield
    stop_processes()


@contextmanager
def stderr_in(file):
    """What C++ code prints goes to the file."""
    sys.stderr.flush()
    kept = os.dup(2)
    os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def join_with_three(rank, world, port, first_dies):
    """(seconds, error, what C++ printed) of a rank of three. first_dies: rank 0 listens, then is gone."""
    if rank == 0 and first_dies:
        import torch.distributed as dist

        store = dist.TCPStore("127.0.0.1", port, 3, True, wait_for_workers=False)
        time.sleep(0.3)
        del store
        return None
    rank += not first_dies
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE="3",
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE="3",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    begin = time.monotonic()
    with tempfile.TemporaryFile("w+") as printed, stderr_in(printed):
        try:
            megatron_ds.init_distributed(timeout=timedelta(seconds=SECONDS))
        except CommunicationError as error:
            seconds = time.monotonic() - begin
            printed.seek(0)
            return seconds, str(error), printed.read()


@contextmanager
def listening():
    """A port at which a program accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=16) as server:
        yield server.getsockname()[1]


def test_a_program_that_listens_and_never_answers_is_an_error_at_the_deadline():
    with listening() as port:
        for rank, (seconds, error, printed) in enumerate(
            run_processes(2, join_with_three, port, False, joined=False), start=1
        ):
            assert seconds >= SECONDS
            assert f"rank {rank} of 3" in error and f"127.0.0.1:{port}" in error
            assert "does not answer" in error
            assert not printed


def test_ranks_end_when_rank_0_dies_after_it_has_listened():
    with listening() as port:
        pass
    for found in run_processes(3, join_with_three, port, True, joined=False)[1:]:
        _, error, printed = found
        assert "could not connect to the other ranks" in error
        assert not printed and "frame #" not in error


def test_a_connection_to_itself_is_not_taken_for_a_listener(monkeypatch):
    """Linux may choose the port that is asked for as that of this side, and then connects without a listener."""
    with listening() as port:
        pass
    connect, tried = socket.create_connection, []

    def to_itself_first(address, timeout):
        tried.append(address)
        if len(tried) == 2:
            server = socket.create_server(address)
            tried.append(server)
        return connect(
            address, timeout, source_address=address if len(tried) == 1 else None
        )

    monkeypatch.setattr(socket, "create_connection", to_itself_first)
    with (
        wait_for_listener("127.0.0.1", port, time.monotonic() + HUNG) as found,
        tried[2],
    ):
        assert found.getpeername() == ("127.0.0.1", port) != found.getsockname()


def test_one_process_has_a_process_group_as_with_deepspeed(tmp_path):
    """A program that calls torch.distributed itself; also its engine, and without a launcher."""
    program = tmp_path / "program.py"
    program.write_text("""
import sys, torch, megatron_ds as deepspeed
if sys.argv[1] == "first":
    deepspeed.init_distributed()
engine, *_ = deepspeed.initialize(model=torch.nn.Linear(3, 1), config={
    "train_batch_size": 2, "zero_optimization": {"stage": 3},
    "optimizer": {"type": "Adam", "params": {"lr": 0.1}}})
engine.backward(engine(torch.ones(2, 3)).sum())
engine.step()
counts = torch.ones(1)
torch.distributed.all_reduce(counts)
torch.distributed.barrier()
print(torch.distributed.get_rank(), torch.distributed.get_world_size(), counts.item(), engine.global_steps)
""")
    environment = {
        key: value
        for key, value in os.environ.items()
        if key not in ("RANK", "WORLD_SIZE")
    }
    for when in ("first", "later"):
        done = subprocess.run(
            [warm_python(), str(program), when],
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.stdout == "0 1 1.0 1\n" and not done.returncode, done.stderr
