"""What a checkpoint costs training, with and without --async-save: waits of steps, and steps that a thread slows.

    python benchmarks/async_save.py                       # 75 M parameters, 0.9 GB, one process
    python benchmarks/async_save.py --folder /mnt/disk --saves 5

Each turn has a save that waits, and a save in the background with steps beside it, in one process. The files of both
are compared. The speed of a machine changes by more than a thread costs. Steps are therefore measured in pairs: the
thread works during one step of a pair, and is held during the other. The first step, beside which the state is copied,
is compared with the step before it. The table has medians over the turns, without the first, which imports and
allocates.
"""

import argparse
import hashlib
import logging
import shutil
import statistics
import sys
import tempfile
import threading
import time
from contextlib import closing
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_ds.config import parse
from megatron_ds.host.pace import Pace
from megatron_ds.mpu.grid import Grid
from megatron_ds.mpu.mesh import Mesh
from megatron_ds.progress.ramps import Progress
from megatron_ds.training.build import build_replica
from megatron_ds.training.saves import WRITERS_SHARE, Saves
from megatron_ds.training.step import train_step
from tests.harness.layout_comparison import open_loader, random_samples

JOB = (
    "--hidden-size 768 --num-layers 8 --num-attention-heads 12 --seq-length 128 --vocab-size 24576 "
    "--max-position-embeddings 128 --micro-batch-size 2 --global-batch-size 4 --mock-data --lr 1e-4 "
    "--train-iters 1000 --eval-iters 0 --num-workers 0 --hidden-dropout 0 --attention-dropout 0"
)


class Run:
    """A replica, its data and its progress."""

    def __init__(self, folder: Path, loader, config, replica):
        self.folder = folder
        self.config = config
        self.replica = replica
        self.progress = Progress()
        self._loader = loader

    def step(self, saves: Saves) -> tuple[float, int]:
        """(seconds of a step, ranks that are ready for the next stage of a save)."""
        begin = time.perf_counter()
        self.replica.saving = saves
        size = self.config.train.global_batch_size
        batch = self.replica.batches.training(self._loader, self.progress, size)
        outcome = train_step(
            self.replica,
            batch,
            self.progress,
            learning_rate=1e-4,
            weight_decay=0.1,
        )
        tokens = size * self.config.model.seq_length
        self.progress = self.progress.after(size, tokens)
        return time.perf_counter() - begin, outcome.ready


class HeldPace(Pace):
    """A pace whose thread works while an event is set, and waits otherwise."""

    def __init__(self, share: float, may_work: threading.Event):
        super().__init__(share)
        self._may_work = may_work

    def pause(self) -> None:
        """Sleep for the share, and then until the thread may work."""
        super().pause()
        self._may_work.wait()


class HeldSaves(Saves):
    """Saves whose thread works while `may_work` is set.

    stall: seconds for which steps waited for the last save: to begin it, for the copies, and between steps
    """

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.may_work = threading.Event()
        self.may_work.set()
        self.stall = 0.0
        self.report = self._keep

    def pace(self) -> Pace:
        """The pace of a run, held."""
        return HeldPace(WRITERS_SHARE, self.may_work)

    def _keep(self, step: int, seconds: float) -> None:
        self.stall = seconds


def turn(run: Run, waiting: Saves, background: HeldSaves) -> dict[str, float]:
    """One turn: what each kind of step and save takes, in seconds."""
    # A save that waits.
    begin = time.perf_counter()
    waiting.save(run.progress, is_last=True)
    waited = time.perf_counter() - begin
    shutil.rmtree(run.folder / f"iter_{run.progress.step:07d}")

    # The state behind the next step, saved in the background.
    before, _ = run.step(waiting)
    step = run.progress.step
    waiting.save(run.progress, is_last=True)
    expected = digest(run.folder, step)
    shutil.rmtree(run.folder / f"iter_{step:07d}")
    begin = time.perf_counter()
    background.save(run.progress)
    begins = time.perf_counter() - begin
    first, ready = run.step(background)
    alone = [before]
    beside = [first]
    background.after_step(ready)
    while background.step != step:
        # Which step of a pair is the first alternates.
        for works in (len(beside) % 2 == 0, len(beside) % 2 == 1):
            seconds, ready = step_of_pair(run, background, works)
            (beside if works else alone).append(seconds)
        background.after_step(ready)
    background.may_work.set()
    background.finish()
    assert digest(run.folder, step) == expected, "other bytes"
    return {
        "waits": waited,
        "begins": begins,
        "stall": background.stall,
        "step alone": statistics.fmean(alone),
        "step beside": statistics.fmean(beside),
        "first alone": before,
        "first beside": first,
        "steps beside": len(beside),
        "slower": sum(beside) / sum(alone) - 1,
    }


def step_of_pair(run: Run, background: HeldSaves, works: bool) -> tuple[float, int]:
    """`Run.step` while the thread works or is held."""
    if works:
        background.may_work.set()
    else:
        background.may_work.clear()
    return run.step(background)


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
        replica = build_replica(config, mesh)
        samples = random_samples(64, 128, config.model.vocab_size, seed=1)
        with closing(open_loader(config, samples, mesh)) as loader:
            run = Run(path, loader, config, replica)
            waiting = Saves(replica, {}, None)
            background = HeldSaves(replica, {}, None)
            turns = [turn(run, waiting, background) for _ in range(1 + args.saves)]
        size = sum(p.numel() for p in replica.parameters) * 12 / 1e9
    print(f"{size:.2f} GB of state, torch {torch.__version__}, {args.saves} turns")
    report(turns[1:])


def report(turns: list[dict[str, float]]) -> None:
    """Print the median of each time, and what follows from them."""
    found = {name: [turn[name] for turn in turns] for name in turns[0]}
    for name, values in found.items():
        middle = statistics.median(values)
        print(f"{name:13} {middle:8.3f}   ({min(values):.3f} to {max(values):.3f})")
    middle = {name: statistics.median(values) for name, values in found.items()}
    print(f"stall: {middle['stall'] / middle['waits']:.1%} of a save that waits")
    print(f"steps beside the thread are {middle['slower']:+.1%} slower")


if __name__ == "__main__":
    main()
