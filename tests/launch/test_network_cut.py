"""The network to a host is cut in mid-training: the launcher names the host, and when the link is back the training
goes on with all hosts from its newest checkpoint. Hosts are network namespaces, each with its sshd."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.clusters import (
    Network,
    free_port,
    missing,
    no_networks,
    ssh_hosts,
    wait_until,
)
from tests.harness.limits import HUNG
from tests.harness.pretraining import losses, same_bits, saved_state
from tests.launch.starts import Launcher, all_end, environment

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(3600),
    pytest.mark.all,
]

STEPS = 20
EVERY = 3  # steps between checkpoints
CUT = 5  # the step behind which the link goes down
PATIENCE = 2 * HUNG
SPOILED = str(Path(__file__).with_name("spoiled_training.py"))
WORDS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 "
    "--global-batch-size 4 --lr 1e-3 --mock-data --vocab-size 61 --eval-iters 0 --log-interval 1 "
    f"--zero-stage 1 --train-iters {STEPS} --save-interval {EVERY} --save save"
).split()


def words(*before: str) -> list[str]:
    return [*before, "--master_port", str(free_port()), SPOILED, *WORDS]


@pytest.fixture
def undisturbed(tmp_path_factory) -> Path:
    """The save folder of two ranks of this host."""
    folder = tmp_path_factory.mktemp("undisturbed")
    command = [sys.executable, "-m", "megatron_ds", "launch"]
    subprocess.run(
        [*command, *words("--num_gpus", "2")],
        cwd=folder,
        env=environment(OMP_NUM_THREADS="1"),
        check=True,
        timeout=PATIENCE,
    )
    return folder / "save"


def test_a_host_whose_network_is_cut_is_named_and_is_used_again_when_it_is_back(
    tmp_path, undisturbed
):
    if reason := missing("sshd", "ssh", "ssh-keygen") or no_networks():
        pytest.skip(reason)
    (tmp_path / "ssh").mkdir()
    (tmp_path / "hosts").write_text("n1 slots=1\nn2 slots=1\n")
    (tmp_path / ".deepspeed_env").write_text("SLOW=0.3\nGLOO_SOCKET_IFNAME=eth0\n")
    save = tmp_path / "save"
    reached = lambda: (
        max(losses(save), default=0) if (save / "metrics.jsonl").exists() else 0
    )
    with Network() as network, ssh_hosts(tmp_path / "ssh", network.places) as hosts:
        flags = ["--hostfile", "hosts", "--launcher", "ssh", "--max-restarts", "2"]
        flags += [f"--launcher_args=-F {hosts.config} -o ConnectTimeout=5"]
        flags += ["--hang-seconds", "3", "--end-seconds", "0"]
        started = Launcher(words(*flags), tmp_path, OMP_NUM_THREADS="1")
        has_ended = lambda: started.process.poll() is not None
        wait_until(lambda: reached() >= CUT or has_ended(), f"step {CUT}", PATIENCE)
        network.set_link("n2", "down")
        named = "no report of n2 for more than"
        wait_until(lambda: named in started.text or has_ended(), named, PATIENCE)
        network.set_link("n2", "up")
        wait_until(has_ended, "the end", PATIENCE)
        code = started.end()
        text = started.text
        assert code == 0, text
        assert all_end(tmp_path, PATIENCE)
    # The cut was in mid-training, and both hosts went on from a checkpoint.
    assert named in text and "the host or the network to it is down" in text
    assert "restart 1: continuing from iteration" in text
    assert text.count("megatron-ds launch: 2 ranks on n1 (1), n2 (1)") == 2, text
    assert losses(save) == losses(undisturbed)
    assert same_bits(saved_state(save, STEPS), saved_state(undisturbed, STEPS))
