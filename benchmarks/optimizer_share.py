"""Share of the optimizer in a training step of one process: seconds of a step, and of the update in it.

    python benchmarks/optimizer_share.py --workload M                   adam, muon in fp32, muon in bf16
    python benchmarks/optimizer_share.py --workload S --optimizers adam lion "muon --muon-num-ns-steps 8"

An optimizer is the words after --optimizer. They take turns in each round, with the same batches; the medians
of the rounds are printed, and the share of the medians. The update begins when the gradients are complete and
measured: it clips, updates and rounds weights. The share is of the CPU time of all threads, in which waiting
for a core is not counted: it is right on a machine that is not idle, too.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.workloads import (
    BETAS,
    CLIP,
    LEARNING_RATE,
    WEIGHT_DECAY,
    WORKLOADS,
    token_batches,
)
from megatron_ds.config import parse
from megatron_ds.mpu.fake_group import fake_mesh
from megatron_ds.progress.ramps import Progress
from megatron_ds.training.build import build_replica
from megatron_ds.training.step import train_step
from tests.harness.layout_comparison import global_batch_share

OPTIMIZERS = ("adam", "muon", "muon --muon-ns-dtype bf16")


class Contestant:
    """A replica with a clock around its update."""

    def __init__(self, optimizer: str, workload: str):
        w = WORKLOADS[workload]
        job = (
            f"--num-layers {w.layers} --hidden-size {w.hidden} --num-attention-heads {w.heads} "
            f"--seq-length {w.seq} --vocab-size {w.vocab} --micro-batch-size {w.micro_batch} "
            f"--global-batch-size {w.global_batch} --mock-data --train-iters 10 --lr {LEARNING_RATE} "
            f"--clip-grad {CLIP} --adam-beta2 {BETAS[1]} --hidden-dropout 0 --attention-dropout 0"
        )
        self.config = parse([*job.split(), "--optimizer", *optimizer.split()], 1)
        self.name = optimizer
        self.updates = []
        self.steps = []
        self.mesh = fake_mesh(self.config.grid(), 0, "cpu")
        self.replica, self.samples = (
            build_replica(self.config, self.mesh),
            torch.tensor(token_batches(w)[0]),
        )
        update = self.replica.optimizer._clip_and_update
        self.replica.optimizer._clip_and_update = lambda *numbers: self._timed(
            self.updates, update, *numbers
        )

    def step(self) -> None:
        """One step."""
        batch = global_batch_share(
            self.samples, 0, len(self.samples), self.config, self.mesh
        )
        self._timed(
            self.steps,
            train_step,
            self.replica,
            batch,
            Progress(step=len(self.steps)),
            learning_rate=LEARNING_RATE,
            weight_decay=WEIGHT_DECAY,
        )

    @staticmethod
    def _timed(seconds, function, *arguments, **named):
        start = time.perf_counter(), time.process_time()
        result = function(*arguments, **named)
        seconds.append((time.perf_counter() - start[0], time.process_time() - start[1]))
        return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", choices=WORKLOADS, default="M")
    parser.add_argument("--optimizers", nargs="+", default=OPTIMIZERS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    contestants = [
        Contestant(optimizer, arguments.workload) for optimizer in arguments.optimizers
    ]
    for _ in range(arguments.rounds + 1):
        for contestant in contestants:
            contestant.step()
    print(
        "| optimizer | s/step | s/update | CPU s/step | CPU s/update | share |\n|---|---|---|---|---|---|"
    )
    for c in contestants:
        wall, cpu = (
            [
                statistics.median(pair[i] for pair in pairs[1:])
                for pairs in (c.steps, c.updates)
            ]
            for i in (0, 1)
        )
        print(
            f"| {c.name} | {wall[0]:.2f} | {wall[1]:.3f} | {cpu[0]:.2f} | {cpu[1]:.3f} | "
            f"{cpu[1] / cpu[0]:.1%} |"
        )


if __name__ == "__main__":
    main()
