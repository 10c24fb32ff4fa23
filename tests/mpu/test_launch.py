"""Environments of launchers, as they look in real jobs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ds.errors import ConfigError
from megatron_ds.launch_env import (
    ends_siblings,
    is_launched,
    local_rank_in,
    rank_in,
    size_in,
)
from megatron_ds.mpu.launch import read_launch
from megatron_ds.mpu.launch_facts import Launch
from megatron_ds.mpu.launchers import expand_nodelist
from tests.harness.limits import HUNG

pytestmark = pytest.mark.plan

SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "11",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_NODELIST": "gpu[003-004,9]",
    "SLURM_TASKS_PER_NODE": "4(x2),3",
}


def test_no_launcher_is_one_rank():
    assert read_launch({}) == Launch(
        rank=0, world_size=1, local_rank=0, local_world_size=1, source="none"
    )


def test_torchrun():
    env = {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "node7",
        "MASTER_PORT": "1234",
    }
    assert read_launch(env) == Launch(3, 4, 1, 2, "node7", 1234, "torchrun")


def test_ranks_started_by_hand_on_one_machine_need_no_local_rank():
    launch = read_launch({"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "localhost"})
    assert (launch.local_rank, launch.local_world_size) == (1, 3)


def test_slurm_takes_the_first_host_and_counts_tasks_of_its_node():
    launch = read_launch(SLURM)
    assert (
        launch.rank,
        launch.world_size,
        launch.local_rank,
        launch.local_world_size,
    ) == (5, 11, 1, 4)
    assert launch.address == "gpu003" and launch.source == "Slurm"
    assert read_launch(SLURM | {"SLURM_NODEID": "2"}).local_world_size == 3


def test_slurm_ranks_of_a_job_agree_on_a_port_and_other_jobs_get_others():
    ports = {read_launch(SLURM | {"SLURM_JOB_ID": str(job)}).port for job in range(20)}
    assert len(ports) > 15 and all(20000 <= port < 32000 for port in ports)
    assert (
        read_launch(SLURM).port
        == read_launch(SLURM | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}).port
    )
    assert read_launch(SLURM | {"MASTER_PORT": "77"}).port == 77


def test_a_slurm_step_smaller_than_its_allocation_counts_its_own_tasks():
    assert (
        read_launch(
            SLURM | {"SLURM_STEP_NUM_TASKS": "6", "SLURM_STEP_NODELIST": "gpu9"}
        ).world_size
        == 6
    )
    assert (
        read_launch(
            SLURM | {"SLURM_STEP_NUM_TASKS": "6", "SLURM_STEP_NODELIST": "gpu9"}
        ).address
        == "gpu9"
    )


def test_torchrun_inside_slurm_wins():
    env = SLURM | {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "1",
    }
    assert read_launch(env).source == "torchrun"


def test_open_mpi_on_one_machine_and_on_several():
    env = {
        "OMPI_COMM_WORLD_RANK": "2",
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_LOCAL_RANK": "2",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
        "PMIX_NAMESPACE": "job1",
    }
    launch = read_launch(env)
    assert (launch.rank, launch.world_size, launch.address, launch.source) == (
        2,
        4,
        "127.0.0.1",
        "Open MPI",
    )
    several = env | {
        "OMPI_COMM_WORLD_LOCAL_RANK": "0",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    }
    with pytest.raises(ConfigError, match="-x MASTER_ADDR"):
        read_launch(several)
    assert read_launch(several | {"MASTER_ADDR": "head"}).address == "head"


# Launcher → the variables of rank 1 of 4, the second of two ranks of its host; then where the host has all four.
SEVERAL = {
    "MPI": {
        "PMI_RANK": "1",
        "PMI_SIZE": "4",
        "MPI_LOCALRANKID": "1",
        "MPI_LOCALNRANKS": "2",
    },
    "MVAPICH2": {
        "MV2_COMM_WORLD_RANK": "1",
        "MV2_COMM_WORLD_SIZE": "4",
        "MV2_COMM_WORLD_LOCAL_RANK": "1",
        "MV2_COMM_WORLD_LOCAL_SIZE": "2",
    },
    "MVAPICH": {
        "MVP_COMM_WORLD_RANK": "1",
        "MVP_COMM_WORLD_SIZE": "4",
        "MVP_COMM_WORLD_LOCAL_RANK": "1",
        "MVP_COMM_WORLD_LOCAL_SIZE": "2",
    },
    "jsrun": {
        "JSM_NAMESPACE_RANK": "1",
        "JSM_NAMESPACE_SIZE": "4",
        "JSM_NAMESPACE_LOCAL_RANK": "1",
        "JSM_NAMESPACE_LOCAL_SIZE": "2",
    },
    "PALS": {
        "PALS_RANKID": "1",
        "PMI_RANK": "1",
        "PMI_SIZE": "4",
        "PALS_LOCAL_RANKID": "1",
        "PMI_LOCAL_SIZE": "2",
    },
    "Flux": {
        "FLUX_TASK_RANK": "1",
        "FLUX_JOB_SIZE": "4",
        "FLUX_TASK_LOCAL_ID": "1",
        "FLUX_JOB_NNODES": "2",
        "PMI_RANK": "1",
        "PMI_SIZE": "4",
    },
}
ON_ONE_HOST = {
    "MPI": {"MPI_LOCALNRANKS": "4"},
    "MVAPICH2": {"MV2_COMM_WORLD_LOCAL_SIZE": "4"},
    "MVAPICH": {"MVP_COMM_WORLD_LOCAL_SIZE": "4"},
    "jsrun": {"JSM_NAMESPACE_LOCAL_SIZE": "4"},
    "PALS": {"PMI_LOCAL_SIZE": "4"},
    "Flux": {"FLUX_JOB_NNODES": "1"},
}


@pytest.mark.parametrize("launcher", SEVERAL)
def test_ranks_of_other_launchers_are_read(launcher):
    env = SEVERAL[launcher]
    with pytest.raises(ConfigError, match=f"{launcher} started 4 ranks.*MASTER_ADDR"):
        read_launch(env)
    there = read_launch(env | {"MASTER_ADDR": "head"})
    assert (there.rank, there.world_size, there.local_rank) == (1, 4, 1)
    assert (there.local_world_size, there.address) == (2, "head")
    here = read_launch(env | ON_ONE_HOST[launcher])
    assert (here.local_world_size, here.address) == (4, "127.0.0.1")
    assert here.source == launcher
    # what is asked before ranks meet is the same
    assert (rank_in(env), size_in(env), local_rank_in(env)) == (1, 4, 1)
    assert is_launched(env) and ends_siblings(env)


def test_ranks_of_mpirun_are_not_those_of_the_daemons_that_srun_started():
    slurm = {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "0",
        "SLURM_NTASKS": "1",
        "SLURM_STEP_NUM_TASKS": "1",
        "SLURM_STEP_NODELIST": "n1",
    }
    ranks = SEVERAL["MPI"] | ON_ONE_HOST["MPI"]
    found = read_launch(slurm | ranks)
    assert (found.rank, found.world_size, found.source) == (1, 4, "MPI")
    # srun itself sets these variables, too, with the same numbers
    same = slurm | {"PMI_RANK": "0", "PMI_SIZE": "1"}
    assert read_launch(same).source == "Slurm"


@pytest.mark.parametrize(
    "env, message",
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 is set but RANK is not"),
        ({"PMI_SIZE": "2"}, "PMI_SIZE=2 is set but PMI_RANK is not"),
        ({"ALPS_APP_PE": "3"}, "aprun started this process as number 3"),
        ({"PMIX_RANK": "1"}, "a launcher with PMIx started this process as number 1"),
        (
            {"PMI_RANK": "1", "PMI_SIZE": "2", "MASTER_ADDR": "head"},
            "sets none of MPI_LOCALRANKID",
        ),
    ],
)
def test_one_of_several_processes_does_not_train_alone(env, message):
    with pytest.raises(ConfigError, match=message):
        read_launch(env)


@pytest.mark.parametrize(
    "env",
    [
        {"WORLD_SIZE": "1"},
        {"FLUX_JOB_SIZE": "4"},
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"},
        {"PMIX_RANK": "0"},
    ],
)
def test_a_process_that_may_be_the_only_one_trains_alone(env):
    assert read_launch(env).world_size == 1


def test_a_shell_of_srun_is_not_one_of_its_tasks(monkeypatch):
    env = {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "0",
        "SLURM_NTASKS": "4",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_NODELIST": "n1",
        "SLURM_TASK_PID": "5",
        "SLURM_PTY_PORT": "40000",
    }
    with pytest.raises(ConfigError, match="srun --pty with 4 tasks"):
        read_launch(env)
    alone = env | {"SLURM_STEP_NUM_TASKS": "1"}
    assert read_launch(alone).world_size == 1
    # a task with a terminal, and a script of a task without one
    for task in (os.getpid(), process_without_terminal()):
        if task is not None:
            assert read_launch(env | {"SLURM_TASK_PID": str(task)}).world_size == 4


def process_without_terminal() -> int | None:
    """The parent of this process, if it has none."""
    stat = Path(f"/proc/{os.getppid()}/stat").read_text()
    terminal = stat.rpartition(")")[2].split()[4]
    return os.getppid() if terminal == "0" else None


@pytest.mark.parametrize(
    "env, message",
    [
        ({"RANK": "0", "WORLD_SIZE": "two"}, "WORLD_SIZE='two'"),
        ({"RANK": "0"}, "WORLD_SIZE is not"),
        ({"RANK": "4", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost"}, "rank 4 of 4"),
        ({"RANK": "1", "WORLD_SIZE": "4"}, "MASTER_ADDR"),
        ({"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "far"}, "LOCAL_RANK"),
        (
            {
                "SLURM_PROCID": "0",
                "SLURM_NTASKS": "2",
                "SLURM_NODELIST": "n1",
                "SLURM_TASK_PID": "9",
            },
            "batch script .* 2 tasks",
        ),
    ],
)
def test_a_broken_environment_names_the_variable(env, message):
    with pytest.raises(ConfigError, match=message):
        read_launch(env)


@pytest.mark.parametrize(
    "text, hosts",
    [
        ("node1", ["node1"]),
        ("a,b-c", ["a", "b-c"]),
        ("gpu[003-005,9],login", ["gpu003", "gpu004", "gpu005", "gpu9", "login"]),
        (
            "r[1-2]n[08-10]x,z",
            ["r1n08x", "r1n09x", "r1n10x", "r2n08x", "r2n09x", "r2n10x", "z"],
        ),
        ("", []),
    ],
)
def test_nodelists_expand(text, hosts):
    assert expand_nodelist(text) == hosts


ALONE = """
import os
from megatron_ds import mpu
sockets = lambda: [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
                   if os.path.exists(f"/proc/self/fd/{fd}")
                   and "socket" in os.readlink(f"/proc/self/fd/{fd}")]
import torch
before = sockets()
mpu.start(mpu.read_launch())
mpu.initialize_model_parallel()
assert sockets() == before, sockets()
assert not torch.distributed.is_initialized()
mpu.stop()
"""


@pytest.mark.skipif(
    not Path("/proc/self/fd").exists(), reason="looks at open files through /proc"
)
def test_a_world_of_one_opens_no_socket():
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")} | {
        "CUDA_VISIBLE_DEVICES": ""
    }
    done = subprocess.run(
        [sys.executable, "-c", ALONE + "print('to the end')"],
        env=env,
        timeout=HUNG,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0 and done.stdout.endswith("to the end\n"), done.stderr


def test_importing_the_package_and_the_grid_does_not_import_torch():
    code = (
        "import sys, megatron_ds, megatron_ds.mpu.grid, megatron_ds.mpu.param_spec; "
        "print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        timeout=HUNG,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr
