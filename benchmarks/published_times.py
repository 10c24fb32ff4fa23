#!/usr/bin/env python
"""Seconds of a step that `--plan-time` predicts, beside those that were published.

    python benchmarks/published_times.py                    # all tables, some minutes
    python benchmarks/published_times.py korthikanti-2022   # one of them
    python benchmarks/published_times.py --cluster my.yaml  # constants of another file

A table whose rows the constants of the cluster were fitted to is marked "in sample". The others were not used for any
fit: their errors are those to expect of a new training. Nothing here is measured on this machine.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_ds.config import parse  # noqa: E402
from megatron_ds.extensions.dry_run.world_plan import plan_world  # noqa: E402
from megatron_ds.extensions.plan_time.cluster import Cluster, read_cluster  # noqa: E402
from megatron_ds.extensions.plan_time.recorded_work import WorkRecorder  # noqa: E402
from megatron_ds.extensions.plan_time.step_time import step_time  # noqa: E402

TRAINING = "--mock-data --lr 1e-4 --train-iters 10"
MODEL = "--num-layers {} --hidden-size {} --num-attention-heads {} --micro-batch-size {} --global-batch-size {}"
GRID = "--tensor-model-parallel-size {} --pipeline-model-parallel-size {}"


@dataclass(frozen=True)
class Row:
    """A published step. seconds: as published"""

    name: str
    ranks: int
    seconds: float
    flags: str


@dataclass(frozen=True)
class Table:
    """Published steps on one cluster. is_fitted: whether the constants of the cluster are fitted to its rows"""

    source: str
    cluster: str
    is_fitted: bool
    rows: list[Row]


def narayanan() -> Iterator[Row]:
    """Yield Table 1 of Narayanan et al. 2021; seconds follow from TFLOP/s by the formula of section 3.

    Columns: layers, hidden size, heads, tp, pp, chunks, GPUs, batch, micro-batch, TFLOP/s of a GPU.
    """
    table = """
    1.7B     24  2304  24 1  1 1   32  512 16 137
    3.6B     30  3072  32 2  1 1   64  512 16 138
    7.5B     36  4096  32 4  1 1  128  512 16 142
    18.4B    40  6144  48 8  1 1  256 1024  8 135
    39.1B    48  8192  64 8  2 1  512 1536  4 138
    76.1B    60 10240  80 8  4 3 1024 1792  2 140
    145.6B   80 12288  96 8  8 2 1536 2304  2 148
    310.1B   96 16384 128 8 16 2 1920 2160  1 155
    529.6B  105 20480 128 8 35 3 2520 2520  1 163
    1008B   128 25600 160 8 64 1 3072 3072  1 163
    """
    for line in table.strip().splitlines():
        name, *numbers = line.split()
        layers, h, heads, tp, pp, chunks, ranks, batch, micro, speed = map(int, numbers)
        s = 2048
        shares = 1 + s / (6 * h) + 51200 / (16 * layers * h)
        flops = 96 * batch * s * layers * h**2 * shares
        flags = [
            MODEL.format(layers, h, heads, micro, batch),
            GRID.format(tp, pp),
            f"--seq-length {s} --vocab-size 51200 --fp16 --recompute-granularity full --zero-stage 0",
            "--communication-data-type fp16 --no-overlap-grad-reduce",
            _chunks(layers, pp, chunks),
        ]
        yield Row(name, ranks, flops / ranks / speed / 1e12, " ".join(flags))


def korthikanti() -> Iterator[Row]:
    """Yield Tables 3 and 5 of Korthikanti et al. 2022: each model with full recomputation, and with selective
    recomputation and sequence parallelism; no data parallelism.

    Columns: layers, hidden size, heads, pp, chunks, GPUs, batch, micro-batch, seconds of both.
    """
    table = """
    22B    48  6144  64  1 1   8   4 4  1.42  1.10
    175B   96 12288  96  8 3  64  64 1 18.13 13.75
    530B  105 20480 128 35 3 280 280 1 49.05 37.83
    1T    128 25600 160 64 1 512 512 1 94.42 71.49
    """
    kinds = ("full", "selective --sequence-parallel")
    for line in table.strip().splitlines():
        name, *numbers = line.split()
        layers, h, heads, pp, chunks, ranks, batch, micro = map(int, numbers[:8])
        for kind, seconds in zip(kinds, map(float, numbers[8:]), strict=True):
            flags = [
                MODEL.format(layers, h, heads, micro, batch),
                GRID.format(8, pp),
                "--seq-length 2048 --vocab-size 51200 --fp16 --zero-stage 0",
                f"--recompute-granularity {kind}",
                _chunks(layers, pp, chunks),
            ]
            yield Row(f"{name}, {kind.split()[0]}", ranks, seconds, " ".join(flags))


def _chunks(layers: int, pp: int, chunks: int) -> str:
    """Return the flag of the layers of a stage, where a rank has several stages."""
    if chunks == 1:
        return ""
    return f"--num-layers-per-virtual-pipeline-stage {layers // pp // chunks}"


TABLES = {
    "narayanan-2021": Table(
        "Narayanan et al. 2021, arXiv:2104.04473, Table 1",
        "a100-80g",
        True,
        list(narayanan()),
    ),
    "korthikanti-2022": Table(
        "Korthikanti et al. 2022, arXiv:2205.05198, Table 5",
        "a100-80g",
        False,
        list(korthikanti()),
    ),
}


def planned(row: Row, cluster: Cluster) -> float:
    """Return the planned seconds of a step."""
    flags = f"{row.flags} {TRAINING} --dry-run"
    config = parse(flags.split(), world_size=row.ranks)
    return step_time(plan_world(config, 0, "cuda", WorkRecorder), cluster).seconds


def lines(table: Table, cluster: Cluster) -> Iterator[str]:
    """Yield a table of Markdown, and the errors."""
    used = "in sample" if table.is_fitted else "not used for a fit"
    yield f"{table.source} ({used}; {cluster.device.name})"
    yield "| model | GPUs | published s | planned s | error |"
    yield "|---|---|---|---|---|"
    errors = []
    for row in table.rows:
        seconds = planned(row, cluster)
        error = seconds / row.seconds - 1
        errors.append(abs(error))
        yield f"| {row.name} | {row.ranks:,} | {row.seconds:.2f} | {seconds:.2f} | {error:+.1%} |"
    yield f"mean {fmean(errors):.1%}, largest {max(errors):.1%}"


def main() -> None:
    """Print the tables that are named, or all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tables", nargs="*", help=f"of {', '.join(TABLES)}")
    parser.add_argument("--cluster", help="in place of the cluster of each table")
    args = parser.parse_args()
    for name in args.tables or TABLES:
        table = TABLES[name]
        for line in lines(table, read_cluster(args.cluster or table.cluster)):
            print(line, flush=True)
        print()


if __name__ == "__main__":
    main()
