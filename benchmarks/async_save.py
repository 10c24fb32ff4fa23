"""What a checkpoint costs training: seconds that steps wait, with and without --async-save, and how much slower steps
are while a thread copies and writes.

    python benchmarks/async_save.py                       # 75 M parameters, 0.9 GB, one process
    python benchmarks/async_save.py --folder /mnt/disk --saves 5

By turns in one process: some steps alone, a save that waits, a save in the background with the steps beside it. The
files of both are compared. A step is the mean of a turn, and the first one beside the thread, which copies the state
meanwhile, is shown alone too. Medians over the turns; the first turn, which imports and allocates, is left out.
"""

import argparse
import hashlib
import logging
import shutil
import statistics
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_ds.config import parse
from megatron_ds.mpu.grid import Grid
from megatron_ds.mpu.mesh import Mesh
from megatron_ds.progress.ramps import Progress
from megatron_ds.training.build import build_engine
from megatron_ds.training.saves import Saves
from megatron_ds.training.step import train_step
from tests.harness.layout_comparison import open_loader, random_samples

JOB = (
    "--hidden-size 768 --num-layers 8 --num-attention-heads 12 --seq-length 128 --vocab-size 24576 "
    "--max-position-embeddings 128 --micro-batch-size 2 --global-batch-size 4 --mock-data --lr 1e-4 "
    "--train-iters 1000 --eval-iters 0 --num-workers 0 --hidden-dropout 0 --attention-dropout 0"
)


class Run:
    """An engine, its data and its progress."""

    def __init__(self, folder: Path, loader, config, engine):
        self.folder = folder
        self.config = config
        self.engine = engine
        self.progress = Progress()
        self._loader = loader

    def step(self, saves: Saves) -> tuple[float, int]:
        """(seconds of a step, ranks that are ready for the next stage of a save)."""
        begin = time.perf_counter()
        self.engine.saving = saves
        size = self.config.train.global_batch_size
        batch = self.engine.batches.training(self._loader, self.progress, size)
        outcome = train_step(
            self.engine,
            batch,
            self.progress,
            learning_rate=1e-4,
            weight_decay=0.1,
        )
        tokens = size * self.config.model.seq_length
        self.progress = self.progress.after(size, tokens)
        return time.perf_counter() - begin, outcome.ready


def turn(run: Run, waiting: Saves, background: Saves, steps: int) -> dict[str, float]:
    """One turn: what each kind of step and save takes, in seconds."""
    alone = [run.step(waiting)[0] for _ in range(steps)]

    # A save that waits.
    begin = time.perf_counter()
    waiting.save(run.progress, is_last=True)
    waited = time.perf_counter() - begin
    expected = digest(run.folder, run.progress.step)
    shutil.rmtree(next(run.folder.glob("iter_*")))

    # The same state, saved in the background.
    step = run.progress.step
    begin = time.perf_counter()
    background.save(run.progress)
    copied = time.perf_counter() - begin
    beside = []
    advanced = 0.0
    while background.step != step:
        seconds, ready = run.step(background)
        beside.append(seconds)
        begin = time.perf_counter()
        background.after_step(ready)
        advanced += time.perf_counter() - begin
    background.finish()
    assert digest(run.folder, step) == expected, "other bytes"
    return {
        "waits": waited,
        "copies": copied,
        "publishes": advanced,
        "step alone": statistics.fmean(alone),
        "first beside": beside[0],
        "step beside": statistics.fmean(beside),
        "steps beside": len(beside),
    }


def digest(folder: Path, step: int) -> str:
    """SHA-256 of the tensors of a checkpoint."""
    found = hashlib.sha256()
    for file in sorted((folder / f"iter_{step:07d}").glob("*.distcp")):
        found.update(file.read_bytes())
    return found.hexdigest()


def parse_arguments() -> argparse.Namespace:
    """The flags of the command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, help="where checkpoints are written")
    parser.add_argument("--saves", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3, help="alone, in each turn")
    return parser.parse_args()


def main() -> None:
    """Measure, and print the table."""
    args = parse_arguments()
    logging.disable(logging.INFO)
    # The turns, all in one process.
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        path = Path(folder)
        words = [*JOB.split(), "--save", folder, "--async-save"]
        config = parse([*words, "--save-interval", "1000"], world_size=1)
        mesh = Mesh(Grid.fit(1), 0, lambda *_: None, torch.device("cpu"))
        engine = build_engine(config, mesh)
        samples = random_samples(64, 128, config.model.vocab_size, seed=1)
        with closing(open_loader(config, samples, mesh)) as loader:
            run = Run(path, loader, config, engine)
            waiting = Saves(engine, {}, None)
            background = Saves(engine, {}, None)
            turns = []
            for _ in range(1 + args.saves):
                found = turn(run, waiting, background, args.steps)
                turns.append(found)
        size = sum(p.numel() for p in engine.parameters) * 12 / 1e9
    print(f"{size:.2f} GB of state, torch {torch.__version__}, {args.saves} turns")
    report(turns[1:])


def report(turns: list[dict[str, float]]) -> None:
    """Print the median of each time, and what follows from them."""
    found = {name: [turn[name] for turn in turns] for name in turns[0]}
    for name, values in found.items():
        middle = statistics.median(values)
        print(f"{name:13} {middle:8.3f}   ({min(values):.3f} to {max(values):.3f})")
    middle = {name: statistics.median(values) for name, values in found.items()}
    stall = middle["copies"] + middle["publishes"]
    print(f"stall: {stall / middle['waits']:.1%} of a save that waits")
    slower = middle["step beside"] / middle["step alone"] - 1
    print(f"a step beside the writer is {slower:+.1%} slower")


if __name__ == "__main__":
    main()
