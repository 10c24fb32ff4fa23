"""Time of one Adam step on the CPU: ours, torch's fused AdamW, DeepSpeed's (if installed) and the copy bandwidth beside them.

    python benchmarks/cpu_adam.py                             100M parameters, 1 and 2 threads, about two minutes
    python benchmarks/cpu_adam.py --parameters 10e6 --rounds 3

`plain` is the update alone, 28 bytes per parameter: p, g, m, v read, p, m, v written. `whole` is what a training step in bf16
needs: the gradient unscaled and clipped by one factor, the update, the bf16 weight written. Ours does that in one pass, 30
bytes; with torch and DeepSpeed it is three passes. GB/s counts the bytes of the one pass for everybody, so that equal work
shows equal figures. Contestants take turns; the median of the rounds counts, the best is shown beside it.
`copy` is numpy's memcpy of one large array to another by as many threads: bytes read and written per second.

DeepSpeed is optional: `pip install deepspeed ninja`; it compiles its own kernel at the first use.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from megatron_ds.ops import adam
from megatron_ds.optim.cpu_adam import CpuAdamW

OPTIONS = dict(lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
DIVISOR = 3.0
BYTES = {"plain": 28, "whole": 30}

Step = Callable[[], None]


def parameter(numel: int) -> torch.nn.Parameter:
    p = torch.nn.Parameter(torch.full((numel,), 0.02))
    p.grad = torch.linspace(-1, 1, numel)
    return p


def ours(p: torch.nn.Parameter, work: str, variant: str = "") -> Step:
    optimizer = CpuAdamW([p], variant=variant, **OPTIONS)
    if work == "whole":
        optimizer.grad_scale, p.low = torch.tensor(DIVISOR), torch.empty(p.numel(), dtype=torch.bfloat16)
    return optimizer.step


def in_passes(optimizer: torch.optim.Optimizer, p: torch.nn.Parameter, work: str) -> Step:
    """Unscaling, update and cast one after the other, each by the fastest means of torch."""
    low = torch.empty(p.numel(), dtype=torch.bfloat16)

    def whole():
        p.grad.mul_(1 / DIVISOR)
        optimizer.step()
        low.copy_(p.detach())

    return whole if work == "whole" else optimizer.step


def torch_fused(p: torch.nn.Parameter, work: str) -> Step:
    return in_passes(torch.optim.AdamW([p], fused=True, **OPTIONS), p, work)


def torch_scaled(p: torch.nn.Parameter, work: str) -> Step:
    """Unscaling inside torch's kernel (its `grad_scale`, which also writes the gradient back), then the cast."""
    optimizer = torch.optim.AdamW([p], fused=True, **OPTIONS)
    if work == "plain":
        return optimizer.step
    low = torch.empty(p.numel(), dtype=torch.bfloat16)

    def whole():
        optimizer.grad_scale = torch.tensor(DIVISOR)
        optimizer.step()
        low.copy_(p.detach())

    return whole


def deepspeed_adam(p: torch.nn.Parameter, work: str) -> Step:
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    return in_passes(DeepSpeedCPUAdam([p], adamw_mode=True, **OPTIONS), p, work)


def contestants() -> dict[str, Callable[[torch.nn.Parameter, str], Step]]:
    found = {f"ours {v}": lambda p, work, v=v: ours(p, work, v) for v in adam.variants()}
    found |= {"torch fused": torch_fused, "torch grad_scale": torch_scaled}
    try:
        deepspeed_adam(parameter(64), "plain")()
        found["deepspeed"] = deepspeed_adam
    except Exception as reason:
        print(f"deepspeed is left out: {type(reason).__name__}: {str(reason).splitlines()[0] if str(reason) else ''}")
    return found


def seconds(step: Step) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def copy_step(numel: int, threads: int) -> Step:
    source, target = np.ones(numel, np.float32), np.ones(numel, np.float32)
    parts = list(zip(np.array_split(source, threads), np.array_split(target, threads)))
    pool = ThreadPoolExecutor(threads)
    return lambda: list(pool.map(lambda pair: np.copyto(pair[1], pair[0]), parts))


def measure(numel: int, threads: int, work: str, rounds: int) -> None:
    torch.set_num_threads(threads)
    # Each has parameters of its own: 1.6 GB per 100M, so a round sweeps through far more than any cache.
    steps = {name: make(parameter(numel), work) for name, make in contestants().items()}
    steps["copy"] = copy_step(numel, threads)
    times = {name: [] for name in steps}
    for step in steps.values():
        step()
    for _ in range(rounds):
        for name, step in steps.items():
            times[name].append(seconds(step))
    base = statistics.median(times["torch fused"])
    for name, t in times.items():
        middle, best = statistics.median(t), min(t)
        width = 8 if name == "copy" else BYTES[work]
        print(f"{threads} thread{'s' * (threads > 1)} | {work} | {name:16s} | median {middle * 1e3:7.1f} ms, "
              f"best {best * 1e3:7.1f} | {numel * width / middle / 1e9:5.1f} GB/s"
              + ("" if name == "copy" else f" | {base / middle:.2f}x torch fused"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=100e6)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--work", nargs="+", choices=list(BYTES), default=list(BYTES))
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    for threads in arguments.threads:
        for work in arguments.work:
            measure(int(arguments.parameters), threads, work, arguments.rounds)


if __name__ == "__main__":
    main()
