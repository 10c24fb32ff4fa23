"""Time and memory of a step whose freed memory is kept by the process, or returned to the system.

    python benchmarks/freed_memory.py                       # 2,048 tokens
    python benchmarks/freed_memory.py --length 8192 --rounds 2

`host/allocator.py` sets glibc's allocator one way or the other. Two processes with a thread each train
the model of longest_sequence.py and take their steps in turns; printed are the shortest step in CPU time and
by the clock, the part of the CPU time that the kernel took, and the peak above the level before the model.
"""

import argparse
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
WAYS = ("kept", "returned")


def main() -> None:
    """Prints a line for each way."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way:
        return train(args)
    # Each way is a process, which takes a step for each line that it reads.
    command = [sys.executable, __file__, "--length", str(args.length), "--way"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    running = {way: subprocess.Popen([*command, way], **pipes) for way in WAYS}
    steps: dict[str, list[list[float]]] = {way: [] for way in WAYS}
    for turn in range(args.rounds + 1):  # the first one allocates
        for way in WAYS if turn % 2 else reversed(WAYS):
            running[way].stdin.write("\n")
            running[way].stdin.flush()
            steps[way].append(
                [float(word) for word in running[way].stdout.readline().split()]
            )
    # The first step of each is not counted.
    for way in WAYS:
        running[way].communicate()
        cpu, clock, kernel, _ = (min(column[1:]) for column in zip(*steps[way]))
        print(
            f"{way:10} {cpu:8.2f} s of a core {clock:8.2f} s {kernel:8.2f} s in the kernel "
            f"{steps[way][-1][3]:8.0f} MiB"
        )


def train(args: argparse.Namespace) -> None:
    """A step for each line of the input; prints its times and the peak so far."""
    import contestants
    import peak_memory
    from workloads import WORKLOADS

    from megatron_ds.training import distributed

    distributed.is_memory_scarce = lambda config: args.way == "returned"
    w = replace(
        WORKLOADS["L8K"], layers=2, hidden=512, heads=8, vocab=15000, seq=args.length
    )
    with ExitStack() as stack:
        level = peak_memory.resident_mib()
        step = contestants.ours(w, 1, "fp32", (), stack)
        peak_memory.forget_peak()
        for i, _ in enumerate(sys.stdin):
            before = os.times()
            start = time.perf_counter()
            step(i)
            now = os.times()
            print(
                now.user + now.system - before.user - before.system,
                time.perf_counter() - start,
                now.system - before.system,
                peak_memory.peak_mib() - level,
                flush=True,
            )


if __name__ == "__main__":
    main()
