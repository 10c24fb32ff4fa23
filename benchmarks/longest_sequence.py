"""Memory of training on long sequences, planned and measured: plain, with recomputation, with tiles, and on
two context-parallel ranks.

    python benchmarks/longest_sequence.py --length 8192                 # a run for each layout
    python benchmarks/longest_sequence.py --memory 4GiB --only plain    # at the longest length that fits
    python benchmarks/longest_sequence.py --memory 4GiB --only tiled --without-scores

A GPT of 14 M parameters with few layers, since attention to long sequences is slow on a CPU. Planned: the
plan's peak of the worst rank, and what a process takes beside it, measured by a run of the same layout with
one layer and 256 tokens: its most resident memory, less its plan. Measured: the most resident memory of any
process of the run. Its first step has 1,024 tokens and creates the optimizer's states; its second step has
the whole sequence. Lengths are multiples of 1,024 tokens.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_ds.config import parse  # noqa: E402
from megatron_ds.extensions.dry_run.longest_sequence import (  # noqa: E402
    bytes_of,
    length_unit,
    longest,
    peak_by_plan,
    without_length,
)

RUN = (
    "--position-embedding-type rope --micro-batch-size 1 --global-batch-size 1 --lr 1e-3 --mock-data "
    "--eval-iters 0 --hidden-dropout 0 --attention-dropout 0 --log-interval 1"
).split()
GPT = "--num-layers 2 --hidden-size 512 --num-attention-heads 8 --vocab-size 15000".split()
SHORT = "--num-layers 1 --seq-length 256 --train-iters 1".split()
UNIT = 1024
TWO_LENGTHS = (
    "--train-iters 2 --curriculum-type seqlen_truncate --curriculum-schedule fixed_discrete "
    f"--curriculum-until-steps 1 --curriculum-lengths {UNIT}"
).split()
RECOMPUTED = ["--recompute-granularity", "full"]
TILED = [*RECOMPUTED, "--tiled-mlp", "--tiled-logits"]
LAYOUTS: dict[str, tuple[int, list[str]]] = {  # name -> ranks, flags
    "plain": (1, []),
    "recomputed": (1, RECOMPUTED),
    "tiled": (1, TILED),
    "cp2": (2, [*TILED, "--context-parallel-size", "2"]),
}


def main() -> None:
    """Prints a line for each layout."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--length", type=int, help="tokens; without it the longest in --memory"
    )
    parser.add_argument("--memory", default="4GiB", help="of a rank")
    parser.add_argument("--only", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument(
        "--without-scores",
        action="store_true",
        help="attention computes no scores: the same memory, less time",
    )
    args, more = parser.parse_known_args()
    print("layout        tokens   libraries     plan  together  measured   off       s")
    for name in args.only:
        ranks = LAYOUTS[name][0]
        flags = [*GPT, *LAYOUTS[name][1], *more]
        short, _ = run(ranks, [*flags, *SHORT], args.without_scores)
        libraries = short - planner(ranks, [*flags, *SHORT])(256)
        plan = planner(ranks, flags)
        length = args.length or longest_in(
            plan, bytes_of(args.memory) - libraries, ranks, flags
        )
        peak = plan(length)
        measured, seconds = run(
            ranks,
            [*flags, "--seq-length", str(length), *TWO_LENGTHS, str(length)],
            args.without_scores,
        )
        mib = [count / 2**20 for count in (libraries, peak, libraries + peak, measured)]
        print(
            f"{name:12}{length:8,} "
            + "".join(f"{count:10,.0f}" for count in mib)
            + f"{measured / (libraries + peak) - 1:8.1%}{seconds:8.0f}",
            flush=True,
        )


def config_of(ranks: int, flags: list[str], length: int):
    """The configuration of a dry run."""
    return parse(
        [*RUN, *flags, "--train-iters", "1", "--dry-run", "--seq-length", str(length)],
        world_size=ranks,
    )


def planner(ranks: int, flags: list[str]):
    """The function length → planned peak."""
    return peak_by_plan(
        lambda length: config_of(ranks, without_length(flags), length), "cpu"
    )


def longest_in(plan, memory: int, ranks: int, flags: list[str]) -> int:
    """The longest sequence whose planned peak is at most `memory`."""
    found = longest(plan, memory, length_unit(config_of(ranks, flags, UNIT), UNIT))
    if found is None:
        raise SystemExit(f"not even {UNIT} tokens fit")
    return found.length


def run(ranks: int, flags: list[str], without_scores: bool) -> tuple[int, float]:
    """(most resident bytes of a process, seconds) of a run."""
    launcher = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
    ]
    script = [str(ROOT / "benchmarks/without_scores.py")] * without_scores + [
        str(ROOT / "pretrain_gpt.py")
    ]
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *launcher * (ranks > 1), *script, *RUN, *flags],
        stdout=subprocess.DEVNULL,
    )
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"the run failed: {' '.join(flags)}")
    return usage.ru_maxrss * 1024, time.perf_counter() - start


if __name__ == "__main__":
    main()
