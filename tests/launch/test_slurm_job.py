"""examples/launch.sbatch in a real Slurm of two nodes: SIGUSR1 before the limit, requeue, and the failure of a node."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.clusters import free_port, wait_until
from tests.harness.limits import HUNG
from tests.launch.starts import ROOT, environment

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(3600),
]

STEPS = 40
PATIENCE = 2 * HUNG
WORDS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 "
    "--global-batch-size 8 --lr 1e-3 --mock-data --vocab-size 61 --eval-iters 0 --log-interval 1 "
    "--zero-stage 1"
).split()


def losses(path: Path) -> dict[int, float]:
    """step → its loss, of the last run of the step."""
    if not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if line["kind"] == "train"}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> dict[int, float]:
    """The losses of the same training by torchrun."""
    folder = tmp_path_factory.mktemp("undisturbed")
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    words += ["--nproc-per-node", "4", str(ROOT / "pretrain_gpt.py"), *WORDS]
    words += ["--train-iters", str(STEPS), "--metrics-jsonl", "losses.jsonl"]
    environ = environment(OMP_NUM_THREADS="1")
    subprocess.run(words, cwd=folder, env=environ, check=True, timeout=PATIENCE)
    return losses(folder / "losses.jsonl")


class Submitted:
    """A job of examples/launch.sbatch with a small training."""

    def __init__(self, slurm, folder: Path, *more: str):
        self.slurm = slurm
        self.folder = folder
        self.metrics = folder / "losses.jsonl"
        script = folder / "launch.sbatch"
        shutil.copy(ROOT / "examples/launch.sbatch", script)
        own = environment(
            OMP_NUM_THREADS="1",
            PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            SAVE=str(folder / "save"),
            STEPS=str(STEPS),
            GPUS="2",
            LAUNCH=f"--master_addr 127.0.0.1 --master_port {free_port()}",
            **slurm.variables,
        )
        words = [
            "sbatch",
            "--parsable",
            "--gpus-per-node=0",
            "--time=30",
            *more,
            str(script),
        ]
        words += [str(ROOT / "pretrain_gpt.py"), *WORDS, "--save-interval", "5"]
        words += ["--metrics-jsonl", str(self.metrics)]
        done = subprocess.run(
            words, cwd=folder, env=own, text=True, capture_output=True
        )
        assert done.returncode == 0, done.stderr
        self.job = done.stdout.strip()

    @property
    def log(self) -> str:
        path = self.folder / f"launch-{self.job}.log"
        return path.read_text() if path.exists() else ""

    def wait_until(self, is_so, what: str) -> None:
        """Wait until a function returns something true; else say what Slurm says of the job."""
        try:
            wait_until(is_so, what, PATIENCE)
        except AssertionError as error:
            shown = self.slurm.run("scontrol", "show", "job", self.job).stdout
            raise AssertionError(f"{error}\n{shown}\n{self.log}") from None

    def wait_for_step(self, step: int) -> None:
        """Wait until a step is done."""
        is_done = lambda: step in losses(self.metrics) or self.has_failed()
        self.wait_until(is_done, f"step {step}")
        assert not self.has_failed(), self.log

    def has_failed(self) -> bool:
        return self.slurm.state(self.job) in ("FAILED", "COMPLETED")

    def start_again(self) -> None:
        """Wait until the job is queued again, and spare it Slurm's two minutes of waiting."""
        is_queued = lambda: self.slurm.state(self.job) in ("PENDING", "COMPLETED")
        self.wait_until(is_queued, "the job is queued again")
        assert self.slurm.state(self.job) == "PENDING", self.log
        self.start_now()

    def start_now(self) -> None:
        """Have it start soon.

        slurmd revokes the job's credentials when it is queued again, by whole seconds: a start within the same
        second fails with "Job credential revoked".
        """
        soon = ("update", f"JobId={self.job}", "StartTime=now+3")
        self.slurm.run("scontrol", *soon, check=True)

    def wait(self) -> None:
        """Wait until it is completed."""
        is_done = lambda: self.slurm.state(self.job) in ("COMPLETED", "FAILED", "")
        self.wait_until(is_done, "the job ends")
        assert self.slurm.state(self.job) in ("COMPLETED", ""), self.log


def test_a_job_that_is_signalled_saves_is_queued_again_and_goes_on(
    slurm, undisturbed, tmp_path
):
    job = Submitted(slurm, tmp_path)
    job.wait_for_step(3)
    slurm.run("scancel", "--signal=USR1", job.job, check=True)  # as --signal does
    job.start_again()
    saved = int((tmp_path / "save/latest_checkpointed_iteration.txt").read_text())
    assert 3 <= saved < STEPS
    job.wait()
    assert losses(job.metrics) == undisturbed
    assert "SIGUSR1" in job.log


def test_a_job_whose_node_fails_is_queued_again_and_goes_on(
    slurm, undisturbed, tmp_path
):
    job = Submitted(slurm, tmp_path)
    job.wait_for_step(6)
    slurm.kill_node("n2")
    try:
        wait_until(
            lambda: slurm.state(job.job) == "PENDING",
            "the job is queued again",
            PATIENCE,
        )
    finally:
        slurm.start_node("n2")
    # a node that is back takes no steps for a moment
    takes_steps = lambda: slurm.run("srun", "-N2", "true").returncode == 0
    wait_until(takes_steps, "both nodes are back", PATIENCE)
    job.start_now()
    job.wait()
    assert losses(job.metrics) == undisturbed
