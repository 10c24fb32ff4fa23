"""Runs that die before their first checkpoint: the same command begins again, to the bits of the undisturbed run."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.clusters import free_port
from tests.harness.limits import HUNG
from tests.harness.pretraining import losses, same_bits, saved_state
from tests.harness.samples import ALL
from tests.harness.warm import warm_python
from tests.launch.early_deaths import WAYS, points_of
from tests.launch.starts import ROOT, Launcher, environment

pytestmark = [pytest.mark.processes, pytest.mark.timeout(3600)]

SPOILED = str(Path(__file__).with_name("spoiled_training.py"))
STEPS = 6
WORDS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 --lr 1e-3 "
    "--global-batch-size 4 --mock-data --vocab-size 61 --eval-iters 0 --log-interval 1 --lr-decay-iters 9 --save save"
).split()
TO_THE_END = ["--train-iters", str(STEPS), "--save-interval", "5"]
WITH_AND_WITHOUT = ("no", "pretrained")
CASES = [(way, base) for way in WAYS for base in WITH_AND_WITHOUT]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("way, base", CASES)
def test_the_same_command_begins_again(tmp_path, way, base):
    """The points of a death take turns over the ways to start; `make test-all` has the product."""
    points = list(points_of(way))
    if not ALL:
        points = points[CASES.index((way, base)) % 4 :: 4]
    answer = subprocess.run(
        [
            warm_python(),
            "-m",
            "tests.launch.early_deaths",
            tmp_path,
            way,
            base,
            *points,
        ],
        capture_output=True,
        text=True,
        timeout=2 * HUNG,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.splitlines() == points


# ------------------------------------------------------------------ whole processes
def run(words: list[str], folder: Path, ranks: int) -> tuple[int, str]:
    """(exit code, output) of a command on ranks of torchrun, without restarts."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1"]
    command += ["--nproc_per_node", str(ranks), "--master_port", str(free_port())]
    done = subprocess.run(
        [*command, *words],
        cwd=folder,
        env=environment(OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=HUNG,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.one_in(2)
@pytest.mark.parametrize("how", ["--max-restarts", "the same command"])
def test_two_ranks_begin_again(tmp_path, how):
    """Rank 1 is killed behind the third step. Without restarts the command names weights to start from."""
    script = str(ROOT / "pretrain_gpt.py")
    spoil = '{"0": [1, 3, "kill"]}'
    right = tmp_path / "right"
    right.mkdir()
    more = list(TO_THE_END)
    if how == "--max-restarts":
        words = ["--num_gpus", "2", "--max-restarts", "2", SPOILED, *WORDS, *more]
        started = Launcher(words, tmp_path, SPOIL=spoil, OMP_NUM_THREADS="1")
        assert started.end() == 0, started.text
        assert len(re.findall(r"restart \d of at most", started.text)) == 1
    else:
        base = tmp_path / "base"
        once = [*WORDS, "--train-iters", "1", "--save", str(base)]
        assert run([script, *once], tmp_path, 2)[0] == 0
        more += ["--load", "save", "--pretrained-checkpoint", str(base)]
        words = ["--num_gpus", "2", SPOILED, *WORDS, *more]
        started = Launcher(words, tmp_path, SPOIL=spoil, OMP_NUM_THREADS="1")
        assert started.end() == 137, started.text
        code, text = run([script, *WORDS, *more], tmp_path, 2)
        assert code == 0, text
    code, text = run([script, *WORDS, *more], right, 2)
    assert code == 0, text
    assert losses(tmp_path / "save") == losses(right / "save")
    ours = saved_state(tmp_path / "save", STEPS)
    assert same_bits(ours, saved_state(right / "save", STEPS))
