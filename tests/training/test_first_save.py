"""The first save of a process imports nothing: on a busy file server imports take minutes, in which all ranks wait."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.pretraining import MOCK

pytestmark = pytest.mark.processes

SAVE = """
import sys
from megatron_ds.training import saves

real = saves.save_run

def save_run(*arguments):
    before = set(sys.modules)
    saved = real(*arguments)
    print("IMPORTED", *sorted(set(sys.modules) - before))
    return saved

saves.save_run = save_run
from megatron_ds.training.pretrain import pretrain
sys.exit(pretrain(sys.argv[1:]))
"""


def test_the_first_save_of_a_process_imports_nothing_large(tmp_path):
    words = [*MOCK, "--train-iters", "1", "--lr-warmup-iters", "0", "--save", tmp_path]
    ended = subprocess.run(
        [sys.executable, "-c", SAVE, *map(str, words)],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    [line] = [x for x in ended.stdout.splitlines() if x.startswith("IMPORTED")]
    imported = line.split()[1:]
    # torch.distributed.checkpoint imports hundreds; a few small ones are of torch.save
    assert "torch.distributed.checkpoint" not in imported and len(imported) < 10, line
