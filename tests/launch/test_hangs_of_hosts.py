"""A rank of the second host stops, and its launcher is ssh or Slurm: it is named with its host, all ranks end, and the
training goes on from its newest checkpoint to the bits of the undisturbed one."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.clusters import free_port, wait_until
from tests.harness.limits import HUNG
from tests.harness.pretraining import losses, same_bits, saved_state
from tests.launch.starts import Launcher, all_end, environment

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(3600),
    pytest.mark.all,
]

STEPS = 12
EVERY = 4  # steps between checkpoints
STOPPED = 3  # a rank of n2
AT = 6  # the iteration in which it stops
PATIENCE = 2 * HUNG
SPOILED = str(Path(__file__).with_name("spoiled_training.py"))
WORDS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 "
    "--global-batch-size 4 --lr 1e-3 --mock-data --vocab-size 61 --eval-iters 0 --log-interval 1 "
    f"--zero-stage 1 --train-iters {STEPS} --save-interval {EVERY} --save save"
).split()


def words(*before: str) -> list[str]:
    return [*before, "--master_port", str(free_port()), SPOILED, *WORDS]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    """The save folder of four ranks of this host."""
    folder = tmp_path_factory.mktemp("undisturbed")
    command = [sys.executable, "-m", "megatron_ds", "launch", "--num_gpus", "4"]
    environ = environment(OMP_NUM_THREADS="1")
    subprocess.run(
        [*command[:4], *words(*command[4:])],
        cwd=folder,
        env=environ,
        check=True,
        timeout=PATIENCE,
    )
    return folder / "save"


@pytest.fixture
def over_ssh(request, tmp_path) -> tuple[list[str], dict[str, str]]:
    """(flags of the launcher, its variables) for two hosts with two ranks each."""
    hosts = request.getfixturevalue("hosts")
    (tmp_path / "hosts").write_text("n1 slots=2\nn2 slots=2\n")
    flags = ["--hostfile", "hosts", "--launcher", "ssh"]
    return [*flags, f"--launcher_args=-F {hosts.config}"], {}


@pytest.fixture
def over_slurm(request, tmp_path):
    """The same in an allocation of Slurm."""
    slurm = request.getfixturevalue("slurm")
    variables = slurm.variables
    name = tmp_path.name
    slurm.run("salloc", "-Q", "-N2", "--no-shell", "-J", name, check=True)
    job = slurm.run("squeue", "-h", "-n", name, "-o", "%i", check=True).stdout.strip()
    allocation = {
        "SLURM_JOB_ID": job,
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_NNODES": "2",
    }
    yield ["--launcher", "slurm", "--num_gpus", "2"], variables | allocation
    slurm.run("scancel", job, check=True)


@pytest.mark.parametrize("way", ["over_ssh", "over_slurm"])
def test_a_rank_of_the_second_host_that_stops_is_named_and_the_training_goes_on(
    request, tmp_path, undisturbed, way
):
    flags, variables = request.getfixturevalue(way)
    spoiled = json.dumps({"0": [STOPPED, AT, "stop"]})
    (tmp_path / ".deepspeed_env").write_text(f"SPOIL={spoiled}\n")
    flags += ["--master_addr", "127.0.0.1", "--max-restarts", "1"]
    flags += ["--hang-seconds", "3", "--end-seconds", "0"]
    started = Launcher(words(*flags), tmp_path, OMP_NUM_THREADS="1", **variables)
    wait_until(lambda: started.process.poll() is not None, "the end", PATIENCE)
    code = started.end()
    text = started.text
    assert code == 0, text
    assert all_end(tmp_path)
    # named with its host, before the others of the run are ended
    assert re.search(rf"rank {STOPPED} on n2 is behind: .*; stopped\.", text), text
    assert "restart 1 of at most 1" in text
    assert f"continuing from iteration {EVERY}" in text
    mine = tmp_path / "save"
    assert losses(mine) == losses(undisturbed)
    assert same_bits(saved_state(mine, STEPS), saved_state(undisturbed, STEPS))
