"""What it costs to watch a run: log line, metrics.jsonl, TensorBoard, places and the communication log together.

    torchrun --nproc-per-node 2 benchmarks/watching.py             two ranks, a GPT of 14 M parameters, 60 steps
    torchrun --nproc-per-node 2 benchmarks/watching.py --steps 200

One run of the training loop, in which steps with and without all of this take turns. Two figures are printed:

    by turns   the time of a step with it less that of the step before without it, as a share: median and quartiles
    directly   the time inside the calls themselves, on rank 0, as a share of the median step without them: wall time,
               and CPU time of the thread as a share of that of the process, which other programs change little.
               The clocks around the calls are counted with them

Each step is logged, where the default of --log-interval is 100.
"""

import argparse
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_ds.extensions.profiler.communication_log import CommunicationLog
from megatron_ds.host import place_file, places
from megatron_ds.training import pretrain as run
from megatron_ds.training import trainer
from megatron_ds.training.observe.log import Log

MODEL = (
    "--num-layers 6 --hidden-size 384 --num-attention-heads 6 --seq-length 128 --vocab-size 8192 "
    "--mock-data --micro-batch-size 1 --global-batch-size 4 --lr 1e-4 --eval-iters 0 --log-interval 1"
).split()
WARM = 4


class Watched(trainer.Trainer):
    """A trainer whose odd steps are watched. Turns: the seconds of steps without and with it."""

    def _step(self):
        if not hasattr(self, "turns"):
            self._prepare()
        is_watched = len(self.turns) % 2 == 1
        self._set(is_watched)
        begin = time.perf_counter()
        cpu = time.process_time()
        outcome = super()._step()
        self.turns.append(time.perf_counter() - begin)
        CPU.append(time.process_time() - cpu)
        return outcome

    def _prepare(self):
        self.turns = TURNS
        self.writer = places.writer()
        self.sinks = self.log.sinks

    def _set(self, is_watched: bool) -> None:
        """Turn everything on or off."""
        CLOCK.is_on = is_watched
        self.log.sinks = self.sinks if is_watched else []
        self.replica.mesh.traffic.log = self.communication if is_watched else None
        places._writer[:] = [self.writer] if is_watched else []


# Seconds of each step.
TURNS: list[float] = []
CPU: list[float] = []


class Clock:
    """Seconds inside functions, outermost calls only."""

    def __init__(self):
        self.wall = 0.0
        self.cpu = 0.0
        self.calls = 0
        self.is_on = False
        self._is_inside = False

    def around(self, owner: type, name: str) -> None:
        """Time the method from now on."""
        method = getattr(owner, name)

        def timed(*args, **kwargs):
            if self._is_inside:
                return method(*args, **kwargs)
            self._is_inside = True
            wall = time.perf_counter()
            cpu = time.thread_time()
            try:
                return method(*args, **kwargs)
            finally:
                if self.is_on:
                    self.cpu += time.thread_time() - cpu
                    self.wall += time.perf_counter() - wall
                    self.calls += 1
                self._is_inside = False

        setattr(owner, name, timed)


CLOCK = Clock()


def main() -> None:
    """Run the ranks, and print the figures on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    rank = int(os.environ.get("RANK", 0))
    CLOCK.around(Log, "write")
    CLOCK.around(CommunicationLog, "_end")
    for name in ("phase", "step", "instruction", "collective"):
        CLOCK.around(place_file.PlaceWriter, name)
    run.Trainer = Watched
    with tempfile.TemporaryDirectory() as folder:
        os.environ[places.PLACES_FILE] = f"{folder}/places-{rank}"
        files = ["--metrics-jsonl", f"{folder}/m.jsonl", "--tensorboard-dir", folder]
        steps = ["--train-iters", str(args.steps)]
        run.pretrain([*MODEL, *files, *steps, "--comms-logger"])
    if rank == 0:
        report()


def report() -> None:
    """The two figures."""
    without = TURNS[WARM::2]
    with_it = TURNS[WARM + 1 :: 2]
    pairs = [b / a - 1 for a, b in zip(without, with_it)]
    low, middle, high = statistics.quantiles(pairs, n=4)
    step = statistics.median(without)
    watched = len(TURNS) // 2
    print(
        f"{platform.processor() or platform.machine()}, torch {torch.__version__}, "
        f"python {platform.python_version()}, {os.cpu_count()} cores, {len(TURNS)} steps"
    )
    print(f"a step without: {step * 1e3:.1f} ms")
    print(f"by turns: {middle:+.2%} [{low:+.2%}, {high:+.2%}]")
    print(f"calls of a step: {CLOCK.calls / watched:.0f}")
    cpu = statistics.median(CPU[WARM::2])
    for clock, seconds, of in (("wall", CLOCK.wall, step), ("CPU", CLOCK.cpu, cpu)):
        each = seconds / watched
        text = (
            f"{each * 1e3:.3f} ms, {each / of:.3%} of the {of * 1e3:.1f} ms of a step"
        )
        print(f"directly, {clock}: {text}")


if __name__ == "__main__":
    main()
