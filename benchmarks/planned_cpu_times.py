#!/usr/bin/env python
"""Seconds of a step that `--plan-time` predicts for processes of this machine, beside those of a stopwatch.

    python tools/measure_device.py --ranks 2 --out mine.yaml
    python benchmarks/planned_cpu_times.py measure --out steps.jsonl --rounds 2    # some minutes
    python benchmarks/planned_cpu_times.py compare steps.jsonl --cluster mine.yaml

The constants are those of single operations and messages: no step of a training is among them. `measure` trains each
layout by pretrain_gpt.py in fresh processes over gloo, one thread each, the layouts in turn in each round, and appends
the seconds of each step to a file. `compare` plans the same flags and prints both, with the quarters of the
steps. No other program should run during either measurement. Workloads are those of workloads.py.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from contestants import our_flags  # noqa: E402
from workloads import WORKLOADS  # noqa: E402

from megatron_ds.config import parse  # noqa: E402
from megatron_ds.extensions.dry_run.world_plan import plan_world  # noqa: E402
from megatron_ds.extensions.plan_time.cluster import Cluster, read_cluster  # noqa: E402
from megatron_ds.extensions.plan_time.recorded_work import WorkRecorder  # noqa: E402
from megatron_ds.extensions.plan_time.step_time import StepTime, step_time  # noqa: E402
from tools.free_port import free_port  # noqa: E402

WARM = 1  # steps before those that count
TENSOR = "--tensor-model-parallel-size 2 --sequence-parallel"
PIPELINE = "--pipeline-model-parallel-size 2 --pipeline-schedule"


@dataclass(frozen=True)
class CpuLayout:
    """A workload and how it is divided. steps: that count, in a round"""

    name: str
    workload: str
    ranks: int
    flags: str
    steps: int

    @property
    def key(self) -> str:
        """Name in the file of measurements."""
        return f"{self.workload}, {self.name}"

    def words(self, steps: int) -> list[str]:
        """Return the flags of a training of some steps."""
        flags = our_flags(WORKLOADS[self.workload], "fp32", tuple(self.flags.split()))
        # The last one of a flag counts.
        return [*flags, "--train-iters", str(steps), "--eval-iters", "0"]


LAYOUTS = (
    CpuLayout("one process", "S", 1, "", 4),
    CpuLayout("one process, recomputation", "S", 1, "--recompute-granularity full", 4),
    CpuLayout("data 2", "S", 2, "", 5),
    CpuLayout("data 2, ZeRO 1", "S", 2, "--zero-stage 1", 5),
    CpuLayout("data 2, ZeRO 3", "S", 2, "--zero-stage 3", 5),
    CpuLayout("tensor 2", "S", 2, TENSOR, 5),
    CpuLayout("pipeline 2, 1F1B", "S", 2, f"{PIPELINE} 1f1b --micro-batch-size 2", 5),
    CpuLayout("pipeline 2, ZB-H1", "S", 2, f"{PIPELINE} zb-h1 --micro-batch-size 2", 5),
    CpuLayout("data 2, micro-batches of 1", "M", 2, "--micro-batch-size 1", 2),
    CpuLayout("data 2, ZeRO 2", "M", 2, "--zero-stage 2", 2),
    CpuLayout("tensor 2", "M", 2, TENSOR, 2),
    CpuLayout("pipeline 2, ZB-H1", "M", 2, f"{PIPELINE} zb-h1", 2),
)


# ---- The stopwatch.


def measured(layout: CpuLayout) -> list[float]:
    """Train a layout in fresh processes, and return the seconds of its steps."""
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder, "metrics.jsonl")
        words = layout.words(WARM + layout.steps)
        words += ["--log-interval", "1", "--metrics-path", str(metrics)]
        command = [sys.executable, str(HERE.parent / "pretrain_gpt.py"), *words]
        port = str(free_port())
        ranks = [
            subprocess.Popen(
                command,
                env=_environment(rank, layout.ranks, port),
                stdout=subprocess.DEVNULL,
            )
            for rank in range(layout.ranks)
        ]
        codes = [rank.wait() for rank in ranks]
        if any(codes):
            raise SystemExit(f"{layout.key}: a rank failed; its error is above")
        records = map(json.loads, metrics.read_text("utf-8").splitlines())
        seconds = [r["step_seconds"] for r in records if r["kind"] == "train"]
    return seconds[WARM:]


def _environment(rank: int, ranks: int, port: str) -> dict[str, str]:
    return os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "CUDA_VISIBLE_DEVICES": "",
    }


def measure(wanted: list[CpuLayout], rounds: int, out: Path) -> None:
    """Append the steps of the layouts to a file, a line for each training.

    A slow minute of the machine is in one round of a layout alone.
    """
    for number in range(rounds):
        for layout in wanted:
            seconds = measured(layout)
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"layout": layout.key, "seconds": seconds}))
                file.write("\n")
            shown = " ".join(f"{s:.3f}" for s in seconds)
            print(f"round {number + 1}: {layout.key:36} {shown}", flush=True)


# ---- The plan.


def planned(layout: CpuLayout, cluster: Cluster) -> StepTime:
    """Return the planned time of a step."""
    words = [*layout.words(10), "--dry-run", "cpu"]
    config = parse(words, world_size=layout.ranks)
    return step_time(plan_world(config, 0, "cpu", WorkRecorder), cluster)


def lines(
    steps: dict[str, list[float]], cluster: Cluster, with_shares: bool
) -> Iterator[str]:
    """Yield a table of Markdown, the errors, and the fastest layout of each workload.

    steps: key of a layout → the seconds of its steps
    """
    yield "| workload, layout | measured s (quarters) | planned s | error |"
    yield "|---|---|---|---|"
    found: dict[str, tuple[float, float]] = {}
    for layout in LAYOUTS:
        seconds = steps.get(layout.key)
        if seconds is None:
            continue
        time = planned(layout, cluster)
        low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
        found[layout.key] = middle, time.seconds
        error = time.seconds / middle - 1
        yield (
            f"| {layout.key} | {middle:.3f} ({low:.3f}–{high:.3f}) | {time.seconds:.3f} | "
            f"{error:+.1%} |"
        )
        if with_shares:
            shares = time.shares.items()
            yield ", ".join(
                f"{what} {share * time.seconds:.3f} s" for what, share in shares
            )
    errors = [abs(plan / step - 1) for step, plan in found.values()]
    yield f"mean {statistics.fmean(errors):.1%}, largest {max(errors):.1%}"
    yield from _fastest(found)


def _fastest(found: dict[str, tuple[float, float]]) -> Iterator[str]:
    """Yield which layout of each workload is the fastest, by stopwatch and by plan.

    found: key of a layout → (measured, planned) seconds
    """
    for workload in dict.fromkeys(layout.workload for layout in LAYOUTS):
        keys = [key for key in found if key.startswith(f"{workload}, ")]
        if not keys:
            continue
        by_watch, by_plan = (
            min(keys, key=lambda key, at=at: found[key][at]) for at in range(2)
        )
        yield f"fastest: {by_watch}; planned: {by_plan}"


def read_steps(path: Path) -> dict[str, list[float]]:
    """Return key of a layout → the seconds of its steps in all rounds."""
    found: dict[str, list[float]] = {}
    for line in path.read_text("utf-8").splitlines():
        record = json.loads(line)
        found.setdefault(record["layout"], []).extend(record["seconds"])
    return found


def main() -> None:
    """Measure the layouts, or compare what was measured with their plans."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    first = commands.add_parser("measure", help="train the layouts")
    first.add_argument("--out", type=Path, required=True, help="file to append to")
    first.add_argument("--rounds", type=int, default=2)
    first.add_argument("--only", default="", help="layouts whose name contains this")
    second = commands.add_parser("compare", help="plan them, and print both")
    second.add_argument("steps", type=Path, help="file of `measure`")
    second.add_argument("--cluster", required=True, help="file of measure_device.py")
    second.add_argument("--shares", action="store_true", help="what a step is spent on")
    args = parser.parse_args()
    if args.command == "measure":
        wanted = [layout for layout in LAYOUTS if args.only in layout.key]
        return measure(wanted, args.rounds, args.out)
    steps = read_steps(args.steps)
    for line in lines(steps, read_cluster(args.cluster), args.shares):
        print(line, flush=True)
    return None


if __name__ == "__main__":
    main()
