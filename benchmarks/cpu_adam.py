"""Time of one Adam step on the CPU: ours, torch's fused AdamW, DeepSpeed's (if installed) and the copy
bandwidth beside them.

    python benchmarks/cpu_adam.py                          100M parameters, 1 and 2 threads, about two minutes
    python benchmarks/cpu_adam.py --parameters 10e6 --rounds 3

`plain` is the update alone, 28 bytes per parameter: p, g, m, v read, p, m, v written. `whole` is what a
training step in bf16 needs: the gradient unscaled and clipped by one factor, the update, the bf16 weight
written. Ours does that in one pass, 30 bytes; with torch and DeepSpeed it is three passes. GB/s counts the
bytes of the one pass for everybody, so that equal work shows equal figures. Contestants take turns; the best
of the rounds counts (the others measure other programs on the machine). On a machine that is not idle trust
the CPU time, which all threads together used: waiting for a core is not in it. "small pages" is ours on p, g
and the bf16 weight as torch allocates them. `copy` is torch's copy of one large array to another on as many
threads: bytes read and written per second.

DeepSpeed is optional: `pip install deepspeed ninja`; it compiles its own kernel at the first use.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from itertools import count

import torch

from megatron_ds.host.memory_maps import huge_page_zeros
from megatron_ds.ops.adam import AdamRow
from megatron_ds.ops.cpu import compiled_adam as adam

OPTIONS = dict(lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
DIVISOR = 1.001      # near 1: the same gradient is divided in every round
BYTES = {"plain": 28, "whole": 30}

Step = Callable[[], None]
Make = Callable[[torch.nn.Parameter, str], Step]


def parameter(numel: int, large_pages: bool) -> torch.nn.Parameter:
    """With .grad and, as .low, the bf16 weight."""
    zeros = huge_page_zeros if large_pages else torch.zeros
    p = torch.nn.Parameter(zeros(numel).fill_(0.02))
    p.grad = zeros(numel).copy_(torch.linspace(-1, 1, numel))
    p.low = zeros(numel, dtype=torch.bfloat16)
    return p


def ours(p: torch.nn.Parameter, work: str, variant: str = "") -> Step:
    weight, moments, steps = p.detach(), [huge_page_zeros(p.numel()) for _ in range(2)], count(1)
    low, grad_scale = (p.low, 1 / DIVISOR) if work == "whole" else (None, 1.0)

    def step() -> None:
        adam.adamw_([AdamRow(weight, p.grad, *moments, next(steps), low)], grad_scale=grad_scale,
                    variant=variant, **OPTIONS)

    return step


def in_passes(optimizer: torch.optim.Optimizer, p: torch.nn.Parameter, work: str) -> Step:
    """Unscaling, update and cast one after the other, each by the fastest means of torch."""
    def whole():
        p.grad.mul_(1 / DIVISOR)
        optimizer.step()
        p.low.copy_(p.detach())

    return whole if work == "whole" else optimizer.step


def torch_fused(p: torch.nn.Parameter, work: str) -> Step:
    return in_passes(torch.optim.AdamW([p], fused=True, **OPTIONS), p, work)


def torch_scaled(p: torch.nn.Parameter, work: str) -> Step:
    """Unscaling inside torch's kernel (its `grad_scale`, which also writes the gradient back), then the cast.
    """
    optimizer = torch.optim.AdamW([p], fused=True, **OPTIONS)
    if work == "plain":
        return optimizer.step
    def whole():
        optimizer.grad_scale = torch.tensor(DIVISOR)
        optimizer.step()
        p.low.copy_(p.detach())

    return whole


def deepspeed_adam(p: torch.nn.Parameter, work: str) -> Step:
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    return in_passes(DeepSpeedCPUAdam([p], adamw_mode=True, **OPTIONS), p, work)


def contestants(variants: list[str]) -> dict[str, tuple[bool, Make]]:
    """Name → (on large pages, how to make its step).

    Large pages are this package's way to allocate, so only ours has them.
    """
    found = {f"ours {v}": (True, partial(ours, variant=v)) for v in variants}
    found |= {"ours, small pages": (False, ours), "torch fused": (False, torch_fused),
              "torch grad_scale": (False, torch_scaled)}
    try:
        deepspeed_adam(parameter(64, False), "plain")()
        found["deepspeed"] = False, deepspeed_adam
    except Exception as reason:
        print(f"deepspeed is left out: {type(reason).__name__}: {reason}")
    return found


def seconds(step: Step) -> tuple[float, float]:
    """Of the clock and of all the process's threads."""
    start, cpu = time.perf_counter(), time.process_time()
    step()
    return time.perf_counter() - start, time.process_time() - cpu


def copy_step(numel: int) -> Step:
    source, target = huge_page_zeros(numel), huge_page_zeros(numel)
    return lambda: target.copy_(source)


def measure(numel: int, threads: int, work: str, rounds: int, variants: list[str]) -> None:
    torch.set_num_threads(threads)
    arrays = {large: parameter(numel, large) for large in (True, False)}
    steps = {name: make(arrays[large], work) for name, (large, make) in contestants(variants).items()}
    steps["copy"] = copy_step(numel)
    times = {name: [] for name in steps}
    for step in steps.values():
        step()
    for _ in range(rounds):
        for name, step in steps.items():
            times[name].append(seconds(step))
    best = {name: [min(column) for column in zip(*t)] for name, t in times.items()}
    for name, (clock, cpu) in best.items():
        width = 8 if name == "copy" else BYTES[work]
        against = [f"{b / x:.2f}" for b, x in zip(best["torch fused"], (clock, cpu))]
        print(f"{threads} thread{'s' * (threads > 1)} | {work} | {name:17s} | {clock * 1e3:6.1f} ms, "
              f"{cpu * 1e3:6.1f} CPU | {numel * width / clock / 1e9:5.1f} GB/s, "
              f"{numel * width / cpu * threads / 1e9:5.1f} by CPU time"
              + ("" if name == "copy" else f" | {against[0]}x torch fused, {against[1]}x by CPU "
                                           "time"), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=100e6)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--work", nargs="+", choices=list(BYTES), default=list(BYTES))
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--variants", nargs="+", choices=adam.variants(), default=adam.variants()[:1])
    arguments = parser.parse_args()
    for threads in arguments.threads:
        for work in arguments.work:
            measure(int(arguments.parameters), threads, work, arguments.rounds, arguments.variants)


if __name__ == "__main__":
    main()
