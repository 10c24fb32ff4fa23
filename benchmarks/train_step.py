"""Seconds, tokens/s and peak memory of our training step beside plain PyTorch's, in one alternating run.

    python benchmarks/train_step.py --workload S --contestants eager ours --rounds 3
    python benchmarks/train_step.py --workload S --contestants ddp ours:dp=2 ours:dp=2,zero=1 --rounds 3
    python benchmarks/train_step.py --workload S --contestants mcore dtensor ours:tp=2

A contestant is `eager`, `ddp`, `dtensor`, `mcore` (two processes each but the first), or `ours[:layout]` with the layout
language of tools/compare_layouts.py. All ranks of one together use two threads. Each round runs every contestant once in
fresh processes, in turn, so that a slow minute of the machine hits all alike; medians over rounds are shown with their
spread. `loss_last` must be equal.
"""

import argparse
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
from workloads import WORKLOADS  # noqa: E402

TOTAL_THREADS = 2


def run_rank(args: argparse.Namespace, stack: ExitStack) -> None:
    """One rank of one contestant: train, measure, print one JSON line from rank 0."""
    import torch
    import torch.distributed as dist
    from contestants import ours
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    w = WORKLOADS[args.workload]
    if args.rank_of == "ours" or args.rank_of.startswith("ours:"):
        from megatron_ds.training.compare import parse_layout
        step = ours(w, world, parse_layout(args.rank_of.partition(":")[2]).flags, stack)
    else:
        if world > 1:
            dist.init_process_group("gloo")
            stack.callback(dist.destroy_process_group)
        step = peer_step(args.rank_of, w, rank, world)
    seconds, losses = [], []
    for i in range(w.warmup + w.steps):
        if world > 1:
            dist.barrier()
        start = time.perf_counter()
        losses.append(step(i))
        if world > 1:
            dist.barrier()
        seconds.append(time.perf_counter() - start)
    peak = [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024]
    if world > 1:
        everyone = [None] * world
        dist.all_gather_object(everyone, peak[0])
        peak = everyone
    if rank == 0:
        print(json.dumps({"contestant": args.rank_of, "workload": w.name, "step_s": statistics.median(seconds[w.warmup:]),
                          "step_min": min(seconds[w.warmup:]), "loss_last": losses[-1], "peak_mib": [round(p) for p in peak],
                          "tokens_s": w.global_batch * w.seq / statistics.median(seconds[w.warmup:])}), flush=True)


def peer_step(contestant: str, w, rank: int, world: int):
    if contestant in ("dtensor", "mcore"):
        import tensor_parallel_peers
        return getattr(tensor_parallel_peers, contestant)(w, rank, world)
    from contestants import plain
    return plain(w, rank, world, distributed=contestant == "ddp")


def world_of(contestant: str) -> int:
    if contestant.startswith("ours"):
        from megatron_ds.training.compare import parse_layout
        return parse_layout(contestant.partition(":")[2]).world_size
    return 1 if contestant == "eager" else 2


def run_contestant(contestant: str, workload: str) -> dict:
    """Start the ranks of one contestant and wait; the record of rank 0."""
    world = world_of(contestant)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    threads = str(max(1, TOTAL_THREADS // world))
    env = os.environ | {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1",
                        "MASTER_PORT": str(port), "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads,
                        "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-W", "ignore", __file__, "--workload", workload, "--rank-of", contestant]
    ranks = [subprocess.Popen(command, env=env | {"RANK": str(r), "LOCAL_RANK": str(r)}, text=True,
                              stdout=subprocess.PIPE if r == 0 else subprocess.DEVNULL) for r in range(world)]
    text, _ = ranks[0].communicate()
    if any(rank.wait() for rank in ranks):
        raise SystemExit(f"{contestant}: a rank failed; its error is above")
    return json.loads(text.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=WORKLOADS, default="S")
    parser.add_argument("--contestants", nargs="+", default=["eager", "ours", "ddp", "ours:dp=2"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="append every record to this JSON-lines file")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_of:
        with ExitStack() as stack:
            return run_rank(args, stack)
    records = {contestant: [] for contestant in args.contestants}
    for number in range(args.rounds):
        for contestant in args.contestants:
            record = run_contestant(contestant, args.workload)
            records[contestant].append(record)
            print(f"round {number + 1}: {contestant:28s} {record['step_s']:.3f} s/step", file=sys.stderr, flush=True)
            if args.output:
                with args.output.open("a") as file:
                    file.write(json.dumps(record) + "\n")
    show(records, args.workload)


def show(records: dict[str, list[dict]], workload: str) -> None:
    print(f"| workload {workload} | s/step median (min–max of rounds) | tokens/s | peak MiB per rank | loss_last |")
    print("|---|---|---|---|---|")
    for contestant, rows in records.items():
        times = [r["step_s"] for r in rows]
        median = statistics.median(times)
        row = rows[times.index(min(times, key=lambda t: abs(t - median)))]
        print(f"| {contestant} | {median:.3f} ({min(times):.3f}–{max(times):.3f}) | {row['tokens_s']:.0f} | "
              f"{' + '.join(map(str, row['peak_mib']))} | {row['loss_last']:.5f} |")


if __name__ == "__main__":
    main()
