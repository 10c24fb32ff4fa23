#!/usr/bin/env python
"""Seconds of a step that `--plan-time` predicts, beside those that were published.

    python benchmarks/published_times.py                    # all tables, some minutes
    python benchmarks/published_times.py korthikanti-2022   # one of them
    python benchmarks/published_times.py --cluster my.yaml  # constants of another file

A table whose rows the constants of the cluster were fitted to is marked "in sample". The others were not used for any
fit: their errors are those to expect of a new training. Nothing here is measured on this machine.

The software of the first table is older than what the package plans: it waited for each all-reduce of tensor
parallelism where it began, and added the fp16 gradients of a micro-batch to those before in a kernel of its own. Both
are added to its plans (`as_in_2021`), so that the constants are those of the device and not of that software.
"""

import argparse
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_ds.config import parse  # noqa: E402
from megatron_ds.extensions.dry_run.world_plan import WorldPlan, plan_world  # noqa: E402
from megatron_ds.extensions.plan_time.cluster import Cluster, read_cluster  # noqa: E402
from megatron_ds.extensions.plan_time.recorded_work import (  # noqa: E402
    Awaited,
    Begun,
    Call,
    Event,
    WorkRecorder,
)
from megatron_ds.extensions.plan_time.step_time import step_time  # noqa: E402
from megatron_ds.ops.work import CallWork  # noqa: E402
from megatron_ds.pipeline.instruction import Op  # noqa: E402

TRAINING = "--mock-data --lr 1e-4 --train-iters 10"
MODEL = "--num-layers {} --hidden-size {} --num-attention-heads {} --micro-batch-size {} --global-batch-size {}"
BYTES_TO_ADD_A_GRADIENT = 6  # two of fp16 are read, one is written
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
    """Published steps on one cluster.

    is_fitted  whether the constants of the cluster are fitted to its rows
    is_of_2021  whether its software neither overlapped all-reduces nor added gradients within products
    """

    source: str
    cluster: str
    rows: list[Row]
    is_fitted: bool = False
    is_of_2021: bool = False


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


def megascale() -> Iterator[Row]:
    """Yield the rows of Megatron-LM in Table 2 of Jiang et al. 2024: 175B, tensor 8, pipeline 8, six stages a rank.

    Fused attention and traffic that overlaps are what section 3 adds to it. What the paper does not name is as in
    recipes of that time: dropout of 0.1, selective recomputation.
    Columns: GPUs, batch, seconds.
    """
    table = """
      256  768 40.0
      512  768 21.2
      768  768 15.2
     1024  768 11.9
     3072 6144 29.02
     6144 6144 14.78
     8192 6144 12.24
    12288 6144  8.57
    """
    for line in table.strip().splitlines():
        ranks, batch, seconds = line.split()
        flags = [
            MODEL.format(96, 12288, 128, 1, batch),
            GRID.format(8, 8),
            "--seq-length 2048 --vocab-size 64000 --bf16 --zero-stage 1 --sequence-parallel",
            "--recompute-granularity selective --no-overlap-grad-reduce",
            _chunks(96, 8, 6),
        ]
        yield Row("175B", int(ranks), float(seconds), " ".join(flags))


def llama() -> Iterator[Row]:
    """Yield rows of Table 4 of Llama Team 2024; seconds follow from its TFLOP/s, 6 FLOPs a parameter and token and
    those of causal attention. The first and the last stage have no block, as section 3.3.2 describes.

    Columns: cp, dp, sequences of a replica, tokens of a sequence, TFLOP/s of a GPU.
    """
    table = """
     1  64 32   8192 430
     1 128 16   8192 400
    16   8 16 131072 380
    """
    for line in table.strip().splitlines():
        cp, dp, sequences, length, speed = map(int, line.split())
        ranks = 8 * cp * 16 * dp
        batch = sequences * dp
        of_a_token = 6 * 405.85e9 + 6 * 126 * 16384 * length
        flags = [
            MODEL.format(126, 16384, 128, 1, batch),
            GRID.format(8, 16),
            f"--context-parallel-size {cp} --cp-comm-type all_gather",
            f"--seq-length {length} --max-position-embeddings {length} --vocab-size 128256",
            "--group-query-attention --num-query-groups 8 --ffn-hidden-size 53248 --swiglu --normalization RMSNorm",
            "--disable-bias-linear --untie-embeddings-and-output-weights --position-embedding-type rope",
            "--bf16 --zero-stage 1 --sequence-parallel --attention-dropout 0 --hidden-dropout 0",
            "--num-virtual-stages-per-pipeline-rank 8 --account-for-embedding-in-pipeline-split",
            "--account-for-loss-in-pipeline-split",
        ]
        seconds = of_a_token * length * batch / ranks / speed / 1e12
        yield Row(f"405B, {length:,} tokens", ranks, seconds, " ".join(flags))


def _chunks(layers: int, pp: int, chunks: int) -> str:
    """Return the flag of the layers of a stage, where a rank has several stages."""
    if chunks == 1:
        return ""
    return f"--num-layers-per-virtual-pipeline-stage {layers // pp // chunks}"


TABLES = {
    "narayanan-2021": Table(
        "Narayanan et al. 2021, arXiv:2104.04473, Table 1",
        "a100-80g",
        list(narayanan()),
        is_fitted=True,
        is_of_2021=True,
    ),
    "korthikanti-2022": Table(
        "Korthikanti et al. 2022, arXiv:2205.05198, Table 5",
        "a100-80g",
        list(korthikanti()),
    ),
    "megascale-2024": Table(
        "Jiang et al. 2024, arXiv:2402.15627, Table 2, Megatron-LM",
        "a100-80g",
        list(megascale()),
    ),
    "llama-2024": Table(
        "Llama Team 2024, arXiv:2407.21783, Table 4",
        "h100",
        list(llama()),
    ),
}


def plan_of(row: Row, is_of_2021: bool = False) -> WorldPlan:
    """Return the plan of a row with its work."""
    flags = f"{row.flags} {TRAINING} --dry-run"
    config = parse(flags.split(), world_size=row.ranks)
    plan = plan_world(config, 0, "cuda", WorkRecorder)
    if is_of_2021:
        as_in_2021(plan)
    return plan


def as_in_2021(plan: WorldPlan) -> None:
    """Make the work of a plan's stages that of the software of 2021."""
    # Stages of one sort share a record.
    stages = {id(stage.run.work): stage for stage in plan.stages}
    for stage in stages.values():
        parameters = sum(p.numel() for p in stage.parameters)
        phases = stage.run.work.phases
        for op, events in phases.items():
            phases[op] = tuple(_awaited_at_once(events))
        added = CallWork(nbytes=BYTES_TO_ADD_A_GRADIENT * parameters)
        phases[Op.B] += (Call("add gradients", "torch", added),)


def _awaited_at_once(events: Iterable[Event]) -> Iterator[Event]:
    """Yield events in which each message is waited for where it begins."""
    for event in events:
        if isinstance(event, Awaited):
            continue
        yield event
        if isinstance(event, Begun):
            yield Awaited(event.number)


def lines(table: Table, cluster: Cluster) -> Iterator[str]:
    """Yield a table of Markdown, and the errors."""
    used = "in sample" if table.is_fitted else "not used for a fit"
    yield f"{table.source} ({used}; {cluster.device.name})"
    yield "| model | GPUs | published s | planned s | error |"
    yield "|---|---|---|---|---|"
    errors = []
    for row in table.rows:
        seconds = step_time(plan_of(row, table.is_of_2021), cluster).seconds
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
