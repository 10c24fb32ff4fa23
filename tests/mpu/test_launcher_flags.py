"""What launchers append to a command."""

import subprocess
from pathlib import Path

import pytest

from tests.harness.limits import HUNG
from tests.harness.warm import warm_python

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
JOB = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 99 "
    "--micro-batch-size 2 --lr 1e-3 --train-iters 1 --mock-data"
)


def test_torch_distributed_launch_may_append_local_rank():
    """It adds --local-rank=0; --print-config ends before any process group."""
    command = [
        warm_python(),
        *(
            "-m torch.distributed.launch --nproc-per-node 1 --master-addr 127.0.0.1 "
            "--master-port 0 pretrain_gpt.py"
        ).split(),
        *JOB.split(),
        "--print-config",
    ]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=HUNG
    )
    assert done.returncode == 0 and "num_layers: 2" in done.stdout, done.stderr[-2000:]
