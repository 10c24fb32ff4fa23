"""Ranks on two hosts that real ssh, pdsh and Slurm reach; both are this machine. They skip where those are not
installed."""

import json
import os
import signal
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.harness.clusters import free_port, missing
from tests.harness.limits import HUNG
from tests.harness.samples import in_turns
from tests.harness.warm import warm_environment
from tests.launch.starts import (
    LEAST,
    PROGRAM,
    ROOT,
    Launcher,
    all_end,
    children_of,
    environment,
    launch,
    printed,
    processes_of,
)
from tests.launch.test_job import ODD_WORDS

pytestmark = pytest.mark.processes

TRAINING = [
    str(ROOT / "pretrain_gpt.py"),
    *"--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1".split(),
    *"--global-batch-size 12 --lr 1e-3 --mock-data --vocab-size 61 --train-iters 3 --eval-iters 0".split(),
    *"--zero-stage 1 --log-interval 1".split(),
]


PROGRAMS = {"pdsh": ["pdsh"], "openmpi": ["mpirun"]}
LAUNCHERS = ("ssh", "pdsh", "slurm", "openmpi")
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


@dataclass(frozen=True)
class Cluster:
    """before: words in front of the script; start: of the whole command line, such as salloc"""

    name: str
    before: list[str]
    variables: dict[str, str]
    has_unequal_slots: bool = True

    @property
    def ranks(self) -> int:
        return 3 if self.has_unequal_slots else 4


@pytest.fixture(params=LAUNCHERS)
def cluster(request, tmp_path) -> Cluster:
    """Two hosts: with one slot and two, but two of two in Slurm."""
    words = ["--master_addr", "127.0.0.1", "--master_port", str(free_port())]
    words += ["--launcher", request.param]
    if request.param == "slurm":
        slurm = request.getfixturevalue("slurm")
        return Cluster("slurm", ["--num_gpus", "2", *words], slurm.variables, False)
    hosts = request.getfixturevalue("hosts")
    (tmp_path / "hosts").write_text("n1 slots=1\nn2 slots=2\n")
    words += ["--hostfile", "hosts"]
    if request.param == "ssh":
        return Cluster("ssh", [*words, f"--launcher_args=-F {hosts.config}"], {})
    if reason := missing(*PROGRAMS.get(request.param, ())):
        pytest.skip(reason)
    if request.param == "openmpi":
        own = f"--allow-run-as-root --mca plm_rsh_args '-F {hosts.config}'"
        return Cluster("openmpi", [*words, f"--launcher_args={own}"], {})
    return Cluster("pdsh", words, {"PDSH_SSH_ARGS_APPEND": f"-F {hosts.config}"})


@pytest.fixture
def folder(tmp_path):
    """A folder in which no process works after the test."""
    yield tmp_path
    assert all_end(tmp_path), processes_of(tmp_path)


@pytest.fixture
def allocated(cluster, folder):
    """The variables of the launcher; within an allocation of Slurm, those of the job, too."""
    if cluster.name != "slurm":
        yield cluster.variables
        return
    environ = environment(**cluster.variables)
    words = ["salloc", "-Q", "-N2", "--no-shell", "-J", folder.name]
    subprocess.run(words, env=environ, check=True, cwd=folder, timeout=HUNG)
    words = ["squeue", "-h", "-n", folder.name, "-o", "%i"]
    job = subprocess.check_output(words, env=environ, text=True).strip()
    yield cluster.variables | {
        "SLURM_JOB_ID": job,
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_NNODES": "2",
    }
    subprocess.run(["scancel", job], env=environ, check=True)


def test_words_arrive_unchanged_and_ranks_are_numbered_host_by_host(
    cluster, folder, allocated
):
    (folder / ".deepspeed_env").write_text("A_VARIABLE=$x 'y' %h\n")
    code, text = launch([*cluster.before, PROGRAM, *ODD_WORDS], folder, **allocated)
    assert code == 0, text
    places = [(0, "0"), (1, "0"), (2, "1")]
    if not cluster.has_unequal_slots:
        places = [(0, "0"), (1, "1"), (2, "0"), (3, "1")]
    found = printed(text)
    assert [(one["rank"], one["LOCAL_RANK"]) for one in found] == places
    for one in found:
        assert one["words"] == [f"--local_rank={one['LOCAL_RANK']}", *ODD_WORDS]
        assert one["A_VARIABLE"] == "$x 'y' %h"
        assert one["WORLD_SIZE"] == str(cluster.ranks)


@pytest.mark.parametrize(
    "cluster, action, code",
    [(name, *end) for name, end in in_turns(LAUNCHERS, [("fail", 1), ("kill", 137)])],
    indirect=["cluster"],
)
def test_a_rank_that_fails_ends_those_of_the_other_host(
    cluster, folder, allocated, action, code
):
    plan = json.dumps({"1": action, "others": "wait"})
    words = [*cluster.before, "--grace-seconds", "20", "--log-dir", "logs", PROGRAM]
    (folder / ".deepspeed_env").write_text(f"PLAN={plan}\n")
    started = Launcher(words, folder, **allocated)
    assert started.end() == code, started.text
    host, local_rank = ("n2", 0) if cluster.has_unequal_slots else ("n1", 1)
    last = started.text[started.text.rindex("megatron-ds launch:") :]
    assert f"rank 1 on {host} (local rank {local_rank}) failed first" in last
    for rank in {*range(cluster.ranks)} - {1}:
        assert f"rank {rank} saved" in (folder / f"logs/rank{rank}.log").read_text()


@pytest.mark.parametrize(
    "cluster, number", in_turns(LAUNCHERS, SIGNALS), indirect=["cluster"]
)
def test_a_signal_reaches_the_ranks_of_both_hosts(cluster, folder, allocated, number):
    plan = json.dumps({"others": "wait"})
    (folder / ".deepspeed_env").write_text(f"PLAN={plan}\n")
    started = Launcher([*cluster.before, PROGRAM], folder, **allocated)
    ranks = range(cluster.ranks)
    started.wait_for(*(f"rank {rank} waits" for rank in ranks))
    started.signal(number)
    assert started.end() == 0, started.text
    for rank in ranks:
        assert f"rank {rank} saves after {number.name}" in started.text
        assert f"rank {rank} saved" in started.text


def test_a_signal_is_not_lost_while_agents_start(cluster, folder, allocated):
    """Ranks end by it, or save where they have begun to handle it."""
    plan = json.dumps({"others": "wait"})
    (folder / ".deepspeed_env").write_text(f"PLAN={plan}\n")
    started = Launcher([*cluster.before, PROGRAM], folder, **allocated)
    started.wait_for(f"{cluster.ranks} ranks on")
    started.signal(signal.SIGTERM)
    assert started.end() in (0, 128 + signal.SIGTERM), started.text


def test_nothing_is_left_behind_when_connections_are_cut(cluster, folder, allocated):
    """One of two ssh is killed, and the ranks ignore SIGTERM. Under Slurm the launcher is killed: slurmd owns tasks."""
    plan = json.dumps({"others": "ignore"})
    (folder / ".deepspeed_env").write_text(f"PLAN={plan}\n")
    words = [*cluster.before, "--grace-seconds", str(LEAST), PROGRAM]
    started = Launcher(words, folder, **allocated)
    started.wait_for(*(f"rank {rank} waits" for rank in range(cluster.ranks)))
    clients = children_of(started.process.pid)
    assert len(clients) == (2 if cluster.name == "ssh" else 1)
    victim = started.process.pid if cluster.name == "slurm" else clients[0]
    os.kill(victim, signal.SIGKILL)
    assert started.end() in (137, -9)


@pytest.mark.parametrize("watched", ["8", "0"])
def test_nothing_is_left_behind_when_the_launcher_is_killed(
    cluster, folder, allocated, watched
):
    """By a program that prints nothing, too."""
    (folder / ".deepspeed_env").write_text(f"PLAN={json.dumps({'others': 'wait'})}\n")
    words = [*cluster.before, "--grace-seconds", str(LEAST), "--hang-seconds", watched]
    started = Launcher([*words, PROGRAM], folder, **allocated)
    started.wait_for(*(f"rank {rank} waits" for rank in range(cluster.ranks)))
    started.process.kill()
    assert started.end() == -signal.SIGKILL
    assert all_end(folder, 30), processes_of(folder)


def test_a_training_ends_with_the_loss_of_torchrun(cluster, folder, allocated):
    words = [*cluster.before, *TRAINING, "--metrics-jsonl", "launch.jsonl"]
    code, text = launch(words, folder, OMP_NUM_THREADS="1", **allocated)
    assert code == 0, text
    assert losses(folder / "launch.jsonl") == losses_of_torchrun(cluster.ranks)


@cache
def losses_of_torchrun(ranks: int) -> list[float]:
    """The losses of the same training on one host."""
    words = ["torchrun", "--standalone", "--nproc-per-node", str(ranks), *TRAINING]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [*words, "--metrics-jsonl", "torchrun.jsonl"],
            cwd=folder,
            env=warm_environment(environment(OMP_NUM_THREADS="1")),
            capture_output=True,
            text=True,
            timeout=HUNG,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return losses(Path(folder, "torchrun.jsonl"))


def losses(path: Path) -> list[float]:
    """The losses of the steps of a run."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    found = [line["loss"] for line in lines if line["kind"] == "train"]
    assert len(found) == 3
    return found
