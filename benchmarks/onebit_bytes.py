"""Bytes that optimizers with one bit an element send over a run with a published warm-up, against Adam whose
gradients are summed in fp16.

    python benchmarks/onebit_bytes.py                  planned, of the models and ranks of the papers
    python benchmarks/onebit_bytes.py --count          and counted on two gloo ranks: the same shares of a run
                                                       of so many steps (--steps), of a small model

What a step sends follows from its number (`extensions/onebit/phases.py`) and from the plan of the layout. Bytes
are those that a rank sends over the data-parallel group, as rings, the norm of the gradient included. Prints
Markdown tables. The models are GPTs of the sizes of BERT-Base and BERT-Large.
"""

import argparse
import multiprocessing
import os
import socket
import sys
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# layers, hidden size, heads of BERT
BASE = (12, 768, 12)
LARGE = (24, 1024, 16)
SMALL = "--num-layers 2 --hidden-size 128 --num-attention-heads 4 --seq-length 32 --vocab-size 500"
COUNTED_RANKS = 2


@dataclass(frozen=True)
class PublishedRun:
    """steps: of the run. options: of the optimizer, the numbers of steps of the run."""

    name: str
    model: tuple[int, int, int]
    ranks: int
    optimizer: str
    steps: int
    options: Mapping[str, int]

    def flags(self, steps: int) -> list[str]:
        """The optimizer with the same shares of a run of so many steps."""
        scaled = {
            name: max(1, round(count * steps / self.steps))
            if name in LENGTHS
            else count
            for name, count in self.options.items()
        }
        return [
            "--optimizer",
            self.optimizer,
            *(
                word
                for name, count in scaled.items()
                for word in (f"--{name}", str(count))
            ),
        ]


LENGTHS = ("freeze-step", "var-freeze-step", "local-step-scaler")
RUNS = (
    PublishedRun(
        "1-bit Adam, BERT-Base",
        BASE,
        64,
        "onebit_adam",
        118_000,
        {"freeze-step": 16_000},
    ),
    PublishedRun(
        "1-bit Adam, BERT-Large",
        LARGE,
        64,
        "onebit_adam",
        152_000,
        {"freeze-step": 23_000},
    ),
    PublishedRun(
        "1-bit LAMB, BERT-Large",
        LARGE,
        256,
        "onebit_lamb",
        5_993,
        {"freeze-step": 1_000},
    ),
    PublishedRun(
        "0/1 Adam, BERT-Base",
        BASE,
        128,
        "zero_one_adam",
        118_000,
        {"var-freeze-step": 12_500, "local-step-scaler": 32_678},
    ),
    PublishedRun(
        "0/1 Adam, BERT-Large",
        LARGE,
        128,
        "zero_one_adam",
        152_000,
        {"var-freeze-step": 12_500, "local-step-scaler": 32_678},
    ),
)
ADAM = ["--optimizer", "adam"]
JOB = (
    "--mock-data --micro-batch-size 1 --lr 1e-3 --hidden-dropout 0 --attention-dropout 0 "
    "--communication-data-type fp16 --eval-iters 0"
).split()


def configured(model: list[str], optimizer: list[str], ranks: int, steps: int):
    """The configuration of a run."""
    from megatron_ds.config import parse

    return parse(
        [
            *model,
            *JOB,
            *optimizer,
            "--train-iters",
            str(steps),
            "--global-batch-size",
            str(ranks),
        ],
        world_size=ranks,
    )


def exchanges(config) -> Counter:
    """How many steps of a run exchange what."""
    from megatron_ds.optim import OPTIMIZERS

    phases = OPTIMIZERS[config.optimizer.optimizer].update_rule(config.optimizer).phases
    return Counter(
        phases.at(step).name for step in range(1, config.train.train_iters + 1)
    )


def over_data(traffic) -> float:
    """Bytes that a rank sends over the data-parallel group."""
    return sum(
        count for (_, axes, _), count in traffic.wire_bytes().items() if axes == "dp-cp"
    )


def planned(
    model: list[str], optimizer: list[str], ranks: int, steps: int
) -> tuple[Counter, float, float]:
    """(steps by what they exchange, bytes of the run, bytes of Adam's)."""
    from megatron_ds.extensions.dry_run.world_plan import plan_world
    from megatron_ds.zero.norm import DATA_BYTES

    config, adam = (configured(model, o, ranks, steps) for o in (optimizer, ADAM))
    full, compressed = (
        over_data(plan_world(c, 0, "cpu").rank_plan(0).traffic) for c in (adam, config)
    )
    kinds = exchanges(config)
    nothing = 2 * DATA_BYTES * (ranks - 1) / ranks
    of = {"FULL": full, "NONE": nothing}
    return (
        kinds,
        sum(of.get(kind, compressed) * count for kind, count in kinds.items()),
        full * steps,
    )


def counted(optimizer: list[str], steps: int, rank: int, port: int) -> float:
    """Bytes that a rank sends in a run of the small model."""
    import torch

    from megatron_ds.mpu import launch as launching
    from megatron_ds.training.distributed import joined
    from tests.harness.layout_comparison import random_samples, train_layout

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    config = configured(SMALL.split(), optimizer, COUNTED_RANKS, steps)
    launch = launching.read_launch(
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(COUNTED_RANKS),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(COUNTED_RANKS),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
    )
    with joined(config, launch) as mesh:
        train_layout(
            config,
            mesh,
            steps,
            random_samples(16, 32, 500, seed=1),
            watch=lambda engine: mesh.traffic.clear(),
        )
        return over_data(mesh.traffic)


def count_on_ranks(
    pool: ProcessPoolExecutor, optimizer: list[str], steps: int
) -> float:
    """`counted` on all ranks; of the first."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    runs = [
        pool.submit(counted, optimizer, steps, rank, port)
        for rank in range(COUNTED_RANKS)
    ]
    return [run.result() for run in runs][0]


def print_planned() -> None:
    """The table of the published runs."""
    print(
        "| run | ranks | steps: full, compressed, none | GB a rank sends | Adam in fp16 | less |"
    )
    print("|---|---|---|---|---|---|")
    for run in RUNS:
        layers, hidden, heads = run.model
        model = (
            f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads {heads} "
            "--seq-length 512 --vocab-size 30522"
        ).split()
        kinds, sent, adam = planned(model, run.flags(run.steps), run.ranks, run.steps)
        some = sum(kinds.values()) - kinds["FULL"] - kinds["NONE"]
        print(
            f"| {run.name} | {run.ranks} | {kinds['FULL']:,}, {some:,}, {kinds['NONE']:,} | "
            f"{sent / 1e9:,.0f} | {adam / 1e9:,.0f} | {adam / sent:.2f} × |",
            flush=True,
        )


def print_counted(steps: int) -> None:
    """The table of the small model."""
    print(
        f"| run, {steps} steps of a small model | planned MB | counted MB | less than Adam, counted |"
    )
    print("|---|---|---|---|")
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(COUNTED_RANKS, mp_context=context) as pool:
        adam = count_on_ranks(pool, ADAM, steps)
        for run in RUNS:
            _, sent, _ = planned(SMALL.split(), run.flags(steps), COUNTED_RANKS, steps)
            found = count_on_ranks(pool, run.flags(steps), steps)
            print(
                f"| {run.name} | {sent / 1e6:.3f} | {found / 1e6:.3f} | {adam / found:.2f} × |",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", action="store_true")
    parser.add_argument("--steps", type=int, default=118)
    args = parser.parse_args()
    os.environ.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    if args.count:
        print_counted(args.steps)
        print()
    print_planned()


if __name__ == "__main__":
    main()
