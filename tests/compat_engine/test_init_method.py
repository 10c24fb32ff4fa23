"""`init_distributed(init_method=, rank=, world_size=)`, as programs for DeepSpeed call it."""

import os

import pytest
import torch
import torch.distributed as dist

import megatron_ds
from megatron_ds.compat.deepspeed.init_method import launch_by
from megatron_ds.errors import ConfigError
from tests.harness.processes import run_processes, stop_processes
from tools.free_port import free_port

pytestmark = pytest.mark.processes


@pytest.fixture(autouse=True)
def _processes_of_their_own():
    """`launch_by` writes variables of a launcher into the environment of these processes."""
    yield
    stop_processes()


def train(rank, world, init_method, in_url):
    """The weights of an engine after two steps."""
    numbers = {} if in_url else {"rank": rank, "world_size": world.size}
    if in_url:
        init_method += f"?rank={rank}&world_size={world.size}"
    megatron_ds.init_distributed(init_method=init_method, **numbers)
    torch.manual_seed(1)
    engine, *_ = megatron_ds.initialize(
        model=torch.nn.Linear(3, 2),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 2},
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        },
    )
    for _ in range(2):
        engine.backward(engine(torch.full((1, 3), float(rank))).sum())
        engine.step()
    weights = [w.tolist() for w in engine.module.parameters()]
    found = dist.get_rank(), dist.get_world_size(), engine.local_rank, weights
    megatron_ds.comm.destroy_process_group()
    return found


@pytest.mark.parametrize("in_url", [False, True])
@pytest.mark.parametrize("method", ["tcp", "file"])
def test_ranks_meet_by_their_arguments(tmp_path, method, in_url):
    url = (
        f"tcp://127.0.0.1:{free_port()}"
        if method == "tcp"
        else f"file://{tmp_path}/meeting"
    )
    found = run_processes(3, train, url, in_url, joined=False)
    assert [(rank, size, local) for rank, size, local, _ in found] == [
        (0, 3, 0),
        (1, 3, 1),
        (2, 3, 2),
    ]
    assert all(weights == found[0][3] for *_, weights in found)


def twice_rank_1(rank, world, init_method):
    with pytest.raises(megatron_ds.errors.CommunicationError) as error:
        megatron_ds.init_distributed(
            init_method=init_method, rank=min(rank, 1), world_size=3
        )
    return str(error.value)


def test_ranks_that_cannot_meet_in_a_file(tmp_path):
    url = f"file://{tmp_path}/meeting"
    for error in run_processes(3, twice_rank_1, url, joined=False):
        assert "two processes have RANK 1 of 3" in error


@pytest.mark.parametrize(
    "method, numbers, env, match",
    [
        ("tcp://h:1", (-1, 2), {}, "without rank:"),
        ("tcp://h", (0, 2), {}, "no host and port"),
        ("tcp://h:x", (0, 2), {}, "no host and port"),
        ("mpi://h:1", (0, 2), {}, "the methods are env://"),
        ("file://relative/x", (0, 2), {}, "three slashes"),
        ("file:///nowhere/at/all/x", (0, 2), {}, "a folder that exists"),
        (None, (1, 2), {"RANK": "0", "WORLD_SIZE": "2"}, "rank=1, but RANK is 0"),
        (
            "tcp://h:2",
            (0, 2),
            {
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "MASTER_ADDR": "h",
                "MASTER_PORT": "1",
            },
            "torchrun's ranks meet at h:1",
        ),
        ("tcp://far:1", (1, 2), {}, "LOCAL_RANK"),
    ],
)
def test_what_cannot_work_is_an_error_with_what_to_do(method, numbers, env, match):
    with pytest.raises(ConfigError, match=match):
        launch_by(method, *numbers, dict(env))


def test_the_environment_then_reads_as_after_a_launcher():
    env = {}
    launch = launch_by("tcp://127.0.0.1:77", 1, 2, env)
    assert (launch.rank, launch.world_size, launch.port) == (1, 2, 77)
    assert env == {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "77",
    }
    assert os.environ.get("MASTER_PORT") != "77"
