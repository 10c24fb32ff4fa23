"""Time of the host for a block, forward and backward, with tensors so small that nothing else takes time.

    python benchmarks/host_time.py                       GPT and Llama, torch's operations and the path of a GPU
    python benchmarks/host_time.py --calls               and which Python functions a block calls

A block of this package, managed by ZeRO, against a GPT block of torch's modules whose gradients accumulate.
They take turns; the medians of the turns are printed, of the CPU time of the thread. On a GPU this time is
what a small block cannot be faster than. The path of a GPU is that of its kernels' wrappers and launches; a
stand-in takes the place of the driver, so no kernel runs.
"""

import argparse
import statistics
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.harness.host_blocks import (
    STYLES,
    calls_of,
    gpu_path,
    own_blocks,
    plain_blocks,
    torch_path,
)

BLOCKS = 8
WARM = 3


def clocked(run, times: int) -> float:
    """Seconds of a run, the least."""
    seconds = []
    for _ in range(times):
        start = time.thread_time()
        run()
        seconds.append(time.thread_time() - start)
    return min(seconds)


def compare(style: str, dtype: str, path: str, turns: int, shows_calls: bool) -> None:
    """One line: our block, the plain one, their ratio, and the Python calls of ours."""
    inside = {
        "torch": torch_path,
        "gpu": gpu_path,
        "cpu": nullcontext,
    }[path]
    with inside():
        own = own_blocks(style, BLOCKS, dtype, f"--kernels {MODES[path]}")
        plain = plain_blocks(BLOCKS, dtype)
        for _ in range(WARM):
            own()
            plain()
        ours = []
        theirs = []
        for _ in range(turns):
            ours.append(clocked(own, 5) / BLOCKS * 1e6)
            theirs.append(clocked(plain, 5) / BLOCKS * 1e6)
        calls = calls_of(own)
    ratio = statistics.median(a / b for a, b in zip(ours, theirs))
    print(
        f"{style:13} {dtype} {path:6} {statistics.median(ours):6.0f} us (least {min(ours):4.0f})  plain "
        f"{statistics.median(theirs):6.0f} (least {min(theirs):4.0f}) us  {ratio:5.2f} x  "
        f"{calls.total() / BLOCKS:6.1f} calls",
        flush=True,
    )
    if shows_calls:
        for (file, name), count in calls.most_common(60):
            print(f"    {count / BLOCKS:6.1f}  {name}  ({file})")


MODES = {"torch": "torch", "gpu": "auto", "cpu": "auto"}


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--styles", nargs="+", default=[*STYLES], choices=[*STYLES])
    parser.add_argument("--dtypes", nargs="+", default=["bf16", "fp32"])
    parser.add_argument("--paths", nargs="+", default=["torch", "gpu"])
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--calls", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for style in options.styles:
        for path in options.paths:
            for dtype in options.dtypes:
                compare(style, dtype, path, options.turns, options.calls)


if __name__ == "__main__":
    main()
