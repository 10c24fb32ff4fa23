"""Seconds, tokens/s and peak memory of our training step beside its peers', in one alternating run.

    python benchmarks/train_step.py --workload S --contestants eager compile ours --rounds 3
    python benchmarks/train_step.py --workload S --dtype bf16 \\
        --contestants ddp ddp-zero ours:dp=2 ours:dp=2,zero=1
    python benchmarks/train_step.py --contestants fsdp2:3 deepspeed:3 ours:dp=2,zero=3 \\
        --python deepspeed=DS/bin/python
    python benchmarks/train_step.py --contestants ddp ours:dp=2 --turns
    python benchmarks/train_step.py --contestants mcore dtensor ours:tp=2

    one process     eager, compile (torch.compile)
    two processes   ddp, ddp-compile; ddp-zero (with ZeroRedundancyOptimizer); fsdp2:2, fsdp2:3;
                    deepspeed:0 to deepspeed:3, with torch's Adam or +cpu_adam; dtensor and mcore (tensor
                    parallel)
    pipelines       torchpp:SCHEDULE[/CUT], dspp[:METHOD] (see pipeline_peers.py); give all contestants
                    one --micro-batch
    ours[:layout]   the layout language of tools/compare_layouts.py

All ranks of one contestant together use two threads. Each round runs every contestant once in fresh
processes, in turn, so that a slow minute of the machine hits all alike; medians over rounds are shown with
their spread. With `--turns` the contestants live together and take their *steps* in turn, one working while
the others sleep, and the ratio of each step to the step of the first contestant beside it is shown, too: for
machines whose speed changes within seconds. `loss_last` must be equal: to 1e-4 in fp32, within rounding in
bf16. `--python` names another interpreter for a contestant's family, for peers that one environment does not
hold; torch's version must be the same in all. Workload T is for trying what runs at all.

bf16 is what each offers: autocast over fp32 weights (eager, compile, ddp, ddp-compile, ddp-zero, dtensor),
16-bit compute from fp32 shards (fsdp2), 16-bit weights with fp32 masters (deepspeed, mcore, ours, and eager,
compile, ddp and ddp-compile with the suffix +mixed).

--malloc keep gives the peers the allocator settings that our runs make for themselves (glibc: one arena,
freed memory is kept). --malloc jemalloc and --malloc mimalloc preload that allocator in all contestants, with
these settings. A step is stalled if it takes more than 1.3 times the median of its round: another
program ran, or the machine was slower. The table shows their number; a round with many is to be repeated.

Memory, per rank, is the peak of resident memory in the training steps: all of it, and what lies above the
level before the model was built, when everything was imported and the ranks connected. The first figure has
each peer's libraries in it. With `--without-scores` attention computes no scores (without_scores.py): the
same memory, in less time; losses are those of another model.
"""

import argparse
import importlib
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
import allocators  # noqa: E402
import peak_memory  # noqa: E402
from workloads import WORKLOADS  # noqa: E402

TOTAL_THREADS = 2
STEP_DONE = "a step is done"


# What is imported only when it is used, by everyone and by a family: loaded before the level of memory is
# read.
LAZY_IMPORTS = {
    "all": ["torch._dynamo", "torch.distributed.tensor"],
    "ours": [
        "megatron_ds.training.build",
        "megatron_ds.training.distributed",
        "megatron_ds.training.step",
        "megatron_ds.data.loading.loader",
        "megatron_ds.checkpoint.pieces",
    ],
    "compile": ["torch._inductor.compile_fx"],
    "ddp-zero": ["torch.distributed.optim"],
    "fsdp2": ["torch.distributed.fsdp"],
    "deepspeed": ["deepspeed"],
    "dtensor": ["torch.distributed.tensor.parallel"],
    "mcore": ["megatron.core.models.gpt.gpt_model"],
    "torchpp": ["torch.distributed.pipelining"],
    "dspp": ["deepspeed.pipe"],
}
TENSOR_PARALLEL = {"dtensor", "mcore"}
STALLED = 1.3  # times the median


def run_rank(args: argparse.Namespace, stack: ExitStack) -> None:
    """One rank of one contestant: train, measure, print one JSON line from rank 0."""
    import torch
    import torch.distributed as dist

    rank, world, threads = (
        int(os.environ[key]) for key in ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS")
    )
    # Imports, threads and the process group, as the contestant needs them.
    w = workload(args)
    for module in (*LAZY_IMPORTS["all"], *LAZY_IMPORTS.get(family(args.rank_of), ())):
        importlib.import_module(module)
    torch.set_num_threads(threads)  # DeepSpeed sets its own
    if args.without_scores:
        import without_scores

        replaced = without_scores.replace_kernels()
        stack.callback(lambda: replaced)
    if family(args.rank_of) != "ours" and world > 1:
        dist.init_process_group("gloo")
        stack.callback(dist.destroy_process_group)
        dist.barrier()
    # The model. Memory counts from here.
    level = peak_memory.resident_mib()
    step = make_step(args.rank_of, w, rank, world, args.dtype, stack)
    peak_memory.forget_peak()
    # The steps. With --turns the parent process says when each begins.
    seconds = []
    losses = []
    for i in range(w.warmup + w.steps):
        if args.turns:
            sys.stdin.readline()
        if world > 1:
            dist.barrier()
        start = time.perf_counter()
        losses.append(step(i))
        if world > 1:
            dist.barrier()
        seconds.append(time.perf_counter() - start)
        if args.turns and rank == 0:
            print(STEP_DONE, flush=True)
    if args.turns:
        sys.stdin.readline()  # it takes a second to end: not beside another's last step
    # The record, with the peaks of all ranks.
    peak = peak_memory.peak_mib()
    peaks = [(peak, peak - level)]
    if world > 1:
        everyone = [None] * world
        dist.all_gather_object(everyone, peaks[0])
        peaks = everyone
    if rank == 0:
        measured = seconds[w.warmup :]
        print(
            json.dumps(
                {
                    "contestant": args.rank_of,
                    "workload": w.name,
                    "dtype": args.dtype,
                    "step_s": statistics.median(measured),
                    "seconds": measured,
                    "stalled": sum(
                        s > STALLED * statistics.median(measured) for s in measured
                    ),
                    "step_min": min(measured),
                    "loss_last": losses[-1],
                    "peak_mib": [round(peak) for peak, _ in peaks],
                    "peak_above_mib": [round(above) for _, above in peaks],
                    "tokens_s": w.global_batch * w.seq / statistics.median(measured),
                }
            ),
            flush=True,
        )


def make_step(contestant: str, w, rank: int, world: int, dtype: str, stack: ExitStack):
    import contestants

    kind, _, detail = contestant.partition(":")
    if kind == "ours":
        from tests.harness.layout_comparison import parse_layout

        return contestants.ours(w, world, dtype, parse_layout(detail).flags, stack)
    if kind in TENSOR_PARALLEL:
        import tensor_parallel_peers

        return getattr(tensor_parallel_peers, kind)(w, rank, world, dtype)
    # Plain models, in one process or under DDP.
    plain, _, policy = kind.partition("+")
    if plain in ("eager", "compile", "ddp", "ddp-compile"):
        return contestants.plain(
            w, rank, world, dtype, "compile" in plain, mixed=policy == "mixed"
        )
    if kind in ("torchpp", "dspp"):
        import pipeline_peers

        name, _, cut = detail.partition("/")
        return (
            pipeline_peers.torchpp(w, rank, dtype, name, cut)
            if kind == "torchpp"
            else pipeline_peers.dspp(w, dtype, detail or "parameters")
        )
    # What divides the state of the optimizer.
    import data_parallel_peers

    if kind == "ddp-zero":
        return data_parallel_peers.ddp_zero(w, rank, world, dtype)
    stage, _, adam = detail.partition("+")
    if kind == "fsdp2":
        return data_parallel_peers.fsdp2(w, rank, world, dtype, int(stage))
    return data_parallel_peers.zero(
        w, rank, world, dtype, int(stage), cpu_adam=adam == "cpu_adam"
    )


def workload(args: argparse.Namespace):
    w = WORKLOADS[args.workload]
    w = replace(w, micro_batch=args.micro_batch or w.micro_batch)
    return replace(w, warmup=0, steps=args.steps) if args.steps else w


def family(contestant: str) -> str:
    return contestant.partition(":")[0]


KNOWN = re.compile(
    r"(eager|compile|ddp|ddp-compile)(\+mixed)?|ddp-zero|dtensor|mcore|fsdp2:[23]|"
    r"deepspeed:[0-3](\+cpu_adam)?|"
    r"torchpp:(gpipe|1f1b|interleaved|interleaved-zb|zbv)(/\d+(\+\d+)+)?|dspp(:parameters|:uniform)?|ours(:.*)?"
)


def check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    from megatron_ds.errors import ConfigError

    for contestant in args.contestants:
        if not KNOWN.fullmatch(contestant):
            parser.error(
                f"no contestant {contestant!r}. There are eager, compile, ddp, ddp-compile (each "
                "also with +mixed), ddp-zero, fsdp2:2, fsdp2:3, deepspeed:0 to "
                "deepspeed:3 (with torch's Adam, or +cpu_adam), dtensor, "
                "mcore, torchpp:SCHEDULE[/CUT], dspp[:METHOD], ours and ours:LAYOUT."
            )
        if args.dtype == "fp32" and contestant.endswith("+mixed"):
            parser.error(
                f"{contestant} has bf16 weights. Leave it out, or take --dtype bf16."
            )
        try:
            world_of(contestant)
        except ConfigError as error:
            parser.error(str(error))


def world_of(contestant: str) -> int:
    if family(contestant) == "ours":
        from tests.harness.layout_comparison import parse_layout

        return parse_layout(contestant.partition(":")[2]).world_size
    return 1 if contestant.partition("+")[0] in ("eager", "compile") else 2


class Running:
    """The processes of one contestant, started."""

    def __init__(
        self, contestant: str, args: argparse.Namespace, pythons: dict[str, str]
    ):
        self.contestant, world = contestant, world_of(contestant)
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        # The environment of a rank, with its share of the threads.
        threads = str(max(1, TOTAL_THREADS // world))
        env = os.environ | {
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "GLOO_SOCKET_IFNAME": "lo",
            "CUDA_VISIBLE_DEVICES": "",
            "DS_ACCELERATOR": "cpu",
        }
        env |= allocators.environment(args.malloc, family(contestant) == "ours")
        python = pythons.get(family(contestant), sys.executable)
        command = [
            python,
            "-W",
            "ignore",
            __file__,
            "--workload",
            args.workload,
            "--dtype",
            args.dtype,
            "--micro-batch",
            str(args.micro_batch),
            "--steps",
            str(args.steps),
            *["--turns"] * args.turns,
            *["--without-scores"] * args.without_scores,
            "--rank-of",
            contestant,
        ]
        # Rank 0 prints the results.
        self.ranks = [
            subprocess.Popen(
                command,
                env=env | {"RANK": str(r), "LOCAL_RANK": str(r)},
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if r == 0 else subprocess.DEVNULL,
            )
            for r in range(world)
        ]

    def take_a_step(self) -> None:
        for rank in self.ranks:
            rank.stdin.write("\n")
            rank.stdin.flush()
        for line in self.ranks[0].stdout:
            if line.strip() == STEP_DONE:
                return
        raise SystemExit(f"{self.contestant}: a rank failed; its error is above")

    def finish(self) -> dict:
        """Wait for the end; the record of rank 0."""
        for rank in self.ranks:
            rank.stdin.close()
        text = self.ranks[0].stdout.read()
        for rank in self.ranks:
            rank.wait()
        # Not the exit codes: peers that have done their work sometimes abort while their process groups are
        # taken down.
        records = [
            line for line in text.splitlines() if line.startswith('{"contestant"')
        ]
        if not records:
            raise SystemExit(f"{self.contestant}: a rank failed; its error is above")
        return json.loads(records[-1])


def run_round(args: argparse.Namespace, pythons: dict[str, str]) -> Iterator[dict]:
    """The record of each contestant, when it has ended: one after the other, or taking their steps in turn."""
    if not args.turns:
        yield from (
            Running(contestant, args, pythons).finish()
            for contestant in args.contestants
        )
        return
    running = []
    w = workload(args)
    for (
        contestant
    ) in args.contestants:  # their first steps, so that nothing is imported later
        running.append(Running(contestant, args, pythons))
        running[-1].take_a_step()
    for _ in range(w.warmup + w.steps - 1):
        for one in running:
            one.take_a_step()
    yield from (one.finish() for one in running)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    # What is measured.
    parser.add_argument("--workload", choices=WORKLOADS, default="S")
    parser.add_argument(
        "--contestants", nargs="+", default=["eager", "ours", "ddp", "ours:dp=2"]
    )
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument(
        "--micro-batch",
        type=int,
        default=0,
        help="samples of a micro-batch, in place of the workload's",
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=0,
        help="measure the first steps, so many, and no "
        "others: for contestants that take minutes for one",
    )
    parser.add_argument("--rounds", type=int, default=3)
    # How the contestants run.
    parser.add_argument(
        "--python",
        nargs="+",
        default=[],
        metavar="FAMILY=PATH",
        help="the interpreter of contestants of a family, as in deepspeed=DS/bin/python",
    )
    parser.add_argument(
        "--turns",
        action="store_true",
        help="all contestants live together and take their "
        "steps in turn; their memory must fit together",
    )
    parser.add_argument(
        "--without-scores",
        action="store_true",
        help="measure memory: attention computes no scores",
    )
    parser.add_argument(
        "--malloc",
        choices=allocators.OF_PEERS,
        default="default",
        help="the peers' allocator settings, or the allocator that all contestants preload; "
        "the settings of ours are always those of a run",
    )
    parser.add_argument(
        "--output", type=Path, help="append every record to this JSON-lines file"
    )
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    args = parser.parse_args()
    # A rank of a contestant is this program again.
    if args.rank_of:
        with ExitStack() as stack:
            return run_rank(args, stack)
    check(parser, args)
    # The rounds, each with all contestants.
    pythons = dict(item.split("=", 1) for item in args.python)
    records = {contestant: [] for contestant in args.contestants}
    for number in range(args.rounds):
        for record in run_round(args, pythons):
            records[record["contestant"]].append(record)
            print(
                f"round {number + 1}: {record['contestant']:28s} {record['step_s']:.3f} "
                "s/step",
                file=sys.stderr,
                flush=True,
            )
            if args.output:
                with args.output.open("a") as file:
                    file.write(json.dumps(record) + "\n")
    show(records, f"{args.workload}, {args.dtype}")
    if args.turns:
        show_ratios(records)


def show(records: dict[str, list[dict]], work: str) -> None:
    print(
        f"| workload {work} | s/step median (min–max of rounds) | best step | stalled steps | tokens/s | "
        "last loss | peak MiB per rank | above the level before the model |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for contestant, rows in records.items():
        times = [r["step_s"] for r in rows]
        median = statistics.median(times)
        row = rows[times.index(min(times, key=lambda t: abs(t - median)))]
        best = min(r["step_min"] for r in rows)
        print(
            f"| {contestant} | {median:.3f} ({min(times):.3f}–{max(times):.3f}) | {best:.3f} | "
            f"{sum(r['stalled'] for r in rows)} | "
            f"{row['tokens_s']:.0f} | {row['loss_last']:.5f} | "
            f"{_per_rank(rows, 'peak_mib')} | {_per_rank(rows, 'peak_above_mib')} |"
        )


def show_ratios(records: dict[str, list[dict]]) -> None:
    """How many times the steps of the first contestant take the time of the steps beside them."""
    first = next(iter(records))
    print(f"\n| times as fast as {first} | median of steps | quarters |\n|---|---|---|")
    for contestant, rows in records.items():
        ratios = [
            a / b
            for row, other in zip(records[first], rows)
            for a, b in zip(row["seconds"], other["seconds"])
        ]
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(f"| {contestant} | {middle:.3f} | {low:.3f}–{high:.3f} |")


def _per_rank(rows: list[dict], key: str) -> str:
    """The most of any round, rank by rank."""
    return " + ".join(str(max(values)) for values in zip(*(row[key] for row in rows)))


if __name__ == "__main__":
    main()
