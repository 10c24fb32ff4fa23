"""examples/launch_hosts.sh on two hosts that real ssh reaches: the check, a small training, and its continuation."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.clusters import free_port
from tests.harness.limits import HUNG
from tests.launch.starts import ROOT, environment

pytestmark = pytest.mark.processes

JOB = """
num_layers: 2
hidden_size: 32
num_attention_heads: 4
seq_length: 16
micro_batch_size: 1
global_batch_size: 4
lr: 1e-3
eval_iters: 0
mock_data: true
vocab_size: 61
train_iters: {steps}
log_interval: 1
"""


@pytest.fixture
def folder(tmp_path) -> Path:
    """What the recipe needs of a checkout, with a small model under the name of its 7B."""
    shutil.copy(ROOT / "pretrain_gpt.py", tmp_path)
    (tmp_path / "examples").mkdir()
    (tmp_path / "hosts").write_text("n1 slots=2\nn2 slots=2\n")
    return tmp_path


def run(folder: Path, hosts, steps: int, **variables: str) -> tuple[int, str]:
    """(exit code, output) of the recipe for so many steps."""
    (folder / "examples/llama_7b.yaml").write_text(JOB.format(steps=steps))
    launch = f"--launcher ssh --launcher_args=-F{hosts.config} --master_addr 127.0.0.1"
    own = environment(
        OMP_NUM_THREADS="1",
        PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        LAUNCH=f"{launch} --master_port {free_port()}",
        SAVE="save",
        **variables,
    )
    done = subprocess.run(
        ["bash", str(ROOT / "examples/launch_hosts.sh"), "hosts"],
        cwd=folder,
        env=own,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=HUNG,
    )
    return done.returncode, done.stdout


def test_the_recipe_checks_the_hosts_trains_and_continues(hosts, folder):
    code, text = run(folder, hosts, steps=3)
    assert "4 ranks on 1 host" in text and "pairs on one host: " in text
    # On a busy machine a rank is slow: then the recipe ends, and names it.
    assert (code == 0) == ("nothing is wrong" in text) == ("problem: " not in text)
    if code:
        code, text = run(folder, hosts, steps=3, NO_CHECK="1")
    assert code == 0, text
    tracker = folder / "save/latest_checkpointed_iteration.txt"
    assert tracker.read_text() == "3"
    assert len([*(folder / "save/logs").glob("rank?.log")]) == 4
    # The same command again.
    code, text = run(folder, hosts, steps=5, NO_CHECK="1")
    assert code == 0 and "4 ranks on 1 host" not in text
    assert tracker.read_text() == "5"
    lines = (folder / "save/metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    steps = [found["step"] for found in records if found["kind"] == "train"]
    assert steps == [1, 2, 3, 4, 5]
