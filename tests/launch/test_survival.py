"""Trainings that survive: a crash, a hang, a host that is lost and comes back. The undisturbed run is the oracle."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.harness.clusters import (
    free_port,
    missing,
    processes_with,
    ssh_hosts,
    wait_until,
)
from tests.harness.limits import HUNG
from tests.harness.pretraining import losses, same_bits, saved_state
from tests.launch.starts import Launcher, children_of, environment

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(3600),
    pytest.mark.all,
]

STEPS = 24
SPOILED = str(Path(__file__).with_name("spoiled_training.py"))
WORDS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 "
    "--global-batch-size 12 --lr 1e-3 --mock-data --vocab-size 61 --eval-iters 0 --log-interval 1 "
    f"--zero-stage 1 --train-iters {STEPS} --save-interval 4 --save save"
).split()
HANGS = ["--hang-seconds", "3", "--end-seconds", "0"]
PATIENCE = 2 * HUNG


def words(*before: str) -> list[str]:
    return [*before, "--master_port", str(free_port()), SPOILED, *WORDS]


def end(started: Launcher) -> int:
    wait_until(lambda: started.process.poll() is not None, "the end", PATIENCE)
    return started.end()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Ranks → the save folder of a training of so many ranks."""
    folders: dict[int, Path] = {}

    def folder_of(ranks: int) -> Path:
        if ranks not in folders:
            folder = tmp_path_factory.mktemp(f"undisturbed{ranks}")
            command = [sys.executable, "-m", "megatron_ds", "launch"]
            command += words("--launcher", "local", "--num_gpus", str(ranks))
            environ = environment(OMP_NUM_THREADS="1")
            subprocess.run(
                command, cwd=folder, env=environ, check=True, timeout=PATIENCE
            )
            folders[ranks] = folder / "save"
        return folders[ranks]

    return folder_of


@pytest.mark.parametrize("how", ["kill", "raise", "stop", "loop"])
def test_a_training_goes_on_to_the_same_bits(tmp_path, undisturbed, how):
    spoiled = json.dumps({"0": [1, 6, how], "1": [2, 13, how]})
    started = Launcher(
        words("--num_gpus", "3", "--max-restarts", "2", *HANGS),
        tmp_path,
        SPOIL=spoiled,
        OMP_NUM_THREADS="1",
    )
    assert end(started) == 0, started.text
    save = tmp_path / "save"
    assert losses(save) == losses(undisturbed(3))
    assert same_bits(saved_state(save, STEPS), saved_state(undisturbed(3), STEPS))
    # both failures are named
    named = r"rank {} on localhost (\(local rank {}\) failed first|is behind)"
    for rank in (1, 2):
        assert re.search(named.format(rank, rank), started.text)
    assert "restart 2: continuing from iteration 12" in started.text


def test_a_run_without_progress_ends_with_the_reason(tmp_path):
    started = Launcher(
        words("--num_gpus", "2", "--max-restarts", "9"),
        tmp_path,
        SPOIL=json.dumps({"all": [1, 5, "raise"]}),
        OMP_NUM_THREADS="1",
    )
    assert end(started) == 1
    assert "no progress: the last 3 starts reached iterations 5, 5, 5" in started.text


def test_a_host_is_lost_and_comes_back(tmp_path, undisturbed):
    """4 → 3 → 4 ranks: dp shrinks and grows, the global batch stays."""
    if reason := missing("sshd", "ssh", "ssh-keygen"):
        pytest.skip(reason)
    (tmp_path / "ssh").mkdir()
    (tmp_path / "hosts").write_text("n1 slots=3\nn2 slots=1\n")
    save = tmp_path / "save"
    reached = lambda step: (
        (save / "metrics.jsonl").exists() and max(losses(save), default=0) >= step
    )
    with ssh_hosts(tmp_path / "ssh") as hosts:
        before = ["--hostfile", "hosts", "--launcher", "ssh", "--min-nodes", "1"]
        before += [f"--launcher_args=-F {hosts.config}", "--max-restarts", "3"]
        before += ["--master_addr", "127.0.0.1", "--end-seconds", "0"]
        (tmp_path / ".deepspeed_env").write_text("SLOW=0.5\n")
        started = Launcher(words(*before), tmp_path, OMP_NUM_THREADS="1")
        is_there = lambda step: (
            lambda: reached(step) or started.process.poll() is not None
        )
        # n2 is lost: three ranks go on
        wait_until(is_there(5), "step 5", PATIENCE)
        hosts.lose("n2")
        wait_until(lambda: "restart 1: continuing" in started.text, "start 1", PATIENCE)
        hosts.bring_back("n2")
        # a rank of n1 is lost: n2 is back for the next start
        step = max(losses(save)) + 5
        wait_until(is_there(step), f"step {step}", PATIENCE)
        assert started.process.poll() is None, started.text
        [process] = rank_processes("n1")[-1:]
        os.kill(process, signal.SIGKILL)
        assert end(started) == 0, started.text
    text = started.text
    assert "n2 does not answer, and is left out" in text
    counts = re.findall(r"megatron-ds launch: (\d) ranks on", text)
    assert counts == ["4", "3", "4"], text
    # other numbers of ranks add gradients in another order
    mine = losses(save)
    whole = losses(undisturbed(4))
    assert mine.keys() == whole.keys()
    assert mine == pytest.approx(whole, rel=1e-5)
    state = saved_state(save, STEPS)
    for name, tensor in saved_state(undisturbed(4), STEPS).items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-3, atol=1e-5)


def rank_processes(host: str) -> list[int]:
    """Ids of the processes of the ranks of a host."""
    agents = [
        process
        for process in processes_with("--host", host)
        if b"launch.agent" in Path(f"/proc/{process}/cmdline").read_bytes()
        and b"ssh\0" not in Path(f"/proc/{process}/cmdline").read_bytes()[:8]
    ]
    return [child for agent in agents for child in children_of(agent)]
