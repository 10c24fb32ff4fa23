"""Memory and time of training steps with and without dropout of attention on a CPU, by the length of sequences.

    OMP_NUM_THREADS=1 python benchmarks/attention_dropout.py
    OMP_NUM_THREADS=1 python benchmarks/attention_dropout.py --lengths 1024 2048 --all-scores

A GPT of two layers, 64 wide, with two heads, in bf16, one sequence a step: scores are what counts. Each row is a
process of its own: the most memory that it held, and the CPU seconds of its fastest step after the first.
--all-scores also measures dropout with the probabilities of all queries in memory, as `reference_attention` computes
them.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

LENGTHS = (1024, 2048, 4096, 16_384)
FLAGS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --vocab-size 131 --micro-batch-size 1 "
    "--global-batch-size 1 --bf16 --hidden-dropout 0 --mock-data --lr 1e-4 --train-iters 100 --num-workers 0 "
    "--eval-iters 0"
)


def measure(length: int, dropout: float, all_scores: bool, steps: int) -> dict:
    """Train in this process."""
    import torch

    from megatron_ds.config import parse
    from megatron_ds.mpu.grid import Grid
    from megatron_ds.mpu.mesh import Mesh
    from megatron_ds.ops import attention_rows
    from megatron_ds.progress.ramps import Progress
    from megatron_ds.training.build import build_replica
    from megatron_ds.training.step import train_step
    from tests.harness.layout_comparison import open_loader, random_samples

    # The replica.
    if all_scores:
        attention_rows.suits = lambda *_: False
    words = [*FLAGS.split(), "--attention-dropout", str(dropout)]
    words += ["--seq-length", str(length)]
    words += ["--max-position-embeddings", str(length)]
    config = parse(words, world_size=1)
    mesh = Mesh(Grid.fit(1), 0, lambda *_: None, torch.device("cpu"))
    replica = build_replica(config, mesh)
    progress = Progress()
    seconds = []
    # The steps.
    samples = random_samples(4, length, config.model.vocab_size, seed=1)
    with closing(open_loader(config, samples, mesh)) as loader:
        for _ in range(steps):
            batch = replica.batches.training(loader, progress, 1)
            start = time.process_time()
            train_step(
                replica,
                batch,
                progress,
                learning_rate=1e-4,
                weight_decay=0.1,
            )
            seconds.append(time.process_time() - start)
            progress = progress.after(1, length)
    kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"mib": kib // 1024, "seconds": min(seconds[1:])}


def measured_apart(*values: float) -> dict:
    """`measure` in a process of its own; {} where it did not end well, as for lack of memory."""
    command = [sys.executable, __file__, "--one", *map(str, values)]
    done = subprocess.run(command, capture_output=True, text=True)
    return json.loads(done.stdout) if done.returncode == 0 else {}


def main() -> None:
    """Print a row for each length."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--all-scores", action="store_true")
    parser.add_argument("--one", nargs=4, type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    # A row, in a process of its own.
    if args.one:
        length, dropout, all_scores, steps = args.one
        found = measure(int(length), dropout, bool(all_scores), int(steps))
        print(json.dumps(found))
        return
    # All rows.
    cases = {"none": (0.0, 0), "by rows": (0.1, 0)}
    if args.all_scores:
        cases["all scores"] = (0.1, 1)
    for length in args.lengths:
        for name, case in cases.items():
            found = measured_apart(length, *case, args.steps)
            text = "did not end" if not found else "{mib:>8,} MiB {seconds:8.3f} s"
            print(f"{length:>8,} {name:12} {text.format(**found)}", flush=True)


if __name__ == "__main__":
    main()
