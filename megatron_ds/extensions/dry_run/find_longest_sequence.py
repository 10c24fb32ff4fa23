"""The longest sequence that a run can train on in a given memory, by plans of ever better lengths.

    megatron-ds longest-sequence --memory 4GiB --num-layers 6 --hidden-size 384 --num-attention-heads 6 \\
        --vocab-size 8192 --position-embedding-type rope --micro-batch-size 1 --lr 1e-3 --train-iters 1
    megatron-ds longest-sequence --memory 70GiB --device cuda --world-size 8 \\
        --tensor-model-parallel-size 8 --sequence-parallel --bf16 … the flags of the run

The flags are those of pretrain_gpt.py, without --seq-length. --memory is of one rank. --libraries is what a
process takes beside the plan: Python, torch, their libraries and the buffers of matrix products, on a GPU the
CUDA context; by default it is measured on a CPU, by training a small model in another process, and 1 GiB on a
GPU. Small is one layer, of at most 512 channels and 16,384 words, so that the products have wide factors.
Both leave out the slots of tensor- and context-parallel ranks of one host (docs/scale/planning.md): subtract
these from --memory.
"""

import os
import subprocess
import sys
from collections.abc import Sequence

from megatron_ds.cli import Arguments
from megatron_ds.config import RunConfig, parse
from megatron_ds.config.parse import read
from megatron_ds.extensions.dry_run.longest_sequence import (
    bytes_of,
    length_range,
    length_unit,
    longest,
    peak_by_plan,
    without_length,
)
from megatron_ds.extensions.dry_run.plan_tables import in_bytes

ON_A_GPU = 1 << 30
SMALL = (
    "--num-layers 1 --num-attention-heads 4 --mock-data --micro-batch-size 1 --lr 1e-3 --eval-iters 0 "
    "--hidden-dropout 0 --attention-dropout 0 --train-iters 1"
).split()
TOKENS = 256
MOST_CHANNELS = 512
MOST_WORDS = 16384


def main(argv: Sequence[str] | None = None) -> int:
    """Search the longest sequence, and print it with its peak."""
    # Each length needs a plan of its own, for which the flags are parsed again.
    args, flags = _parser().parse_known_args(argv)
    flags = without_length(flags)
    given = read(flags)  # without rules, which need a length
    dry = ["--dry-run"] if given.is_default("plan.dry_run") else []

    def parse_length(length: int) -> RunConfig:
        return parse(
            [*flags, *dry, "--seq-length", str(length)],
            world_size=given.plan.world_size or 1,
        )

    # Libraries take a part of the memory.
    unit = length_unit(given, args.multiple_of)
    least, most = length_range(given, unit)
    libraries = _libraries(args, parse_length(least))
    # The search makes about ten plans.
    found = longest(
        peak_by_plan(parse_length, args.device),
        bytes_of(args.memory) - libraries,
        unit,
        most,
        least,
    )
    if found is None:
        print(f"not even {least:,} tokens fit in {args.memory}")
        return 1
    # The next length shows how close the limit is.
    print(f"longest sequence: {found.length:,} tokens, a multiple of {unit:,}")
    print(
        f"  peak of the worst rank {in_bytes(found.peak + libraries)} of {args.memory}, of which libraries "
        f"take {in_bytes(libraries)}"
    )
    if found.beyond:
        print(
            f"  {found.length + unit:,} tokens would take {in_bytes(found.beyond + libraries)}"
        )
    return 0


def _parser() -> Arguments:
    parser = Arguments(description=__doc__)
    parser.add_argument(
        "--memory", required=True, help="of a rank, such as 4GiB or 4GB"
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument(
        "--multiple-of",
        type=int,
        default=128,
        metavar="N",
        help="lengths are multiples of N tokens and of what the layout and blocks of "
        "sparse attention divide",
    )
    parser.add_argument(
        "--libraries",
        metavar="SIZE",
        help="memory of a process beside the plan, such as 300MiB",
    )
    return parser


def _libraries(args, config: RunConfig) -> int:
    """Measure the bytes of a process beside its plan: the peak of a small run, without what is planned for it."""
    if args.libraries:
        return bytes_of(args.libraries)
    if args.device != "cpu":
        return ON_A_GPU
    # for which torch loads its compiler
    model = config.model
    how = config.train.recompute_granularity
    flags = [
        *SMALL,
        "--hidden-size",
        str(min(model.hidden_size, MOST_CHANNELS) // 8 * 8),
        "--vocab-size",
        str(min(model.vocab_size or MOST_WORDS, MOST_WORDS)),
        "--seq-length",
        str(TOKENS),
        *(["--recompute-granularity", how] if how else []),
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "megatron_ds", "train", *flags],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(
            "training a small model to measure the memory of libraries failed: give "
            "--libraries."
        )
    planned = peak_by_plan(lambda _: parse([*flags, "--dry-run"], world_size=1), "cpu")(
        TOKENS
    )
    return usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024) - planned
