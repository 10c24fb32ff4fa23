"""Time of one step of an optimizer on the CPU: ours, torch's, DeepSpeed's (if installed) and the copy
bandwidth beside them.

    python benchmarks/cpu_optimizers.py                    Adam, Lion, Adagrad of 100M parameters: six minutes
    python benchmarks/cpu_optimizers.py --optimizers adam --parameters 10e6 --rounds 3

`plain` is the update alone: weight, gradient and state read, weight and state written; 28 bytes per parameter
for Adam, 20 for Lion and Adagrad. `whole` is what a training step in bf16 needs: the gradient unscaled and
clipped by one factor, the update, the bf16 weight written. Ours does that in one pass, 2 bytes more; with
torch and DeepSpeed it is three passes. GB/s counts the bytes of the one pass for everybody, so that equal
work shows equal figures. Contestants take turns; the best of the rounds counts (the others measure other
programs on the machine). On a machine that is not idle trust the CPU time, which all threads together used:
waiting for a core is not in it. "small pages" is ours on p, g and the bf16 weight as torch allocates them.
`copy` is torch's copy of one large array to another on as many threads: bytes read and written per second.
torch has no Lion.

DeepSpeed is optional: `pip install deepspeed ninja`; it compiles its own kernel at the first use.
"""

import argparse
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from megatron_ds.extensions.kernels.cpu import compiled_adam
from megatron_ds.host.large_pages import huge_page_zeros
from megatron_ds.ops.update_rows import AdamRow, UpdateRow

DIVISOR = 1.001  # near 1: the same gradient is divided in every round
LOW_BYTES = {"plain": 0, "whole": 2}

Step = Callable[[], None]
Make = Callable[[torch.nn.Parameter, str], Step]


@dataclass(frozen=True)
class Contest:
    """An optimizer. make: ours, with keywords; peers: name → torch optimizers of others, made from a list."""

    bytes: int
    ours: Callable[..., Step]
    peers: Mapping[str, Callable[[list], torch.optim.Optimizer]]
    baseline: str


def parameter(numel: int, large_pages: bool) -> torch.nn.Parameter:
    """A fp32 weight of `numel` elements with its gradient in .grad and its bf16 copy in .low."""
    zeros = huge_page_zeros if large_pages else torch.zeros
    p = torch.nn.Parameter(zeros(numel).fill_(0.02))
    p.grad = zeros(numel).copy_(torch.linspace(-1, 1, numel))
    p.low = zeros(numel, dtype=torch.bfloat16)
    return p


def our_adam(p: torch.nn.Parameter, work: str, variant: str = "") -> Step:
    row = AdamRow(
        p.detach(),
        p.grad,
        *(huge_page_zeros(p.numel()) for _ in range(2)),
        1,
        low_of(p, work),
    )
    steps = 0

    def step() -> None:
        nonlocal steps
        steps += 1
        compiled_adam.adamw_(
            [row._replace(step=steps)],
            grad_scale=scale_of(work),
            variant=variant,
            **ADAM,
        )

    return step


def our_lion(p: torch.nn.Parameter, work: str, variant: str = "") -> Step:
    return one_state(
        "lion", p, work, variant, lr=1e-4, beta1=0.9, beta2=0.99, weight_decay=0.1
    )


def our_adagrad(p: torch.nn.Parameter, work: str, variant: str = "") -> Step:
    return one_state("adagrad", p, work, variant, **ADAGRAD)


def one_state(
    rule: str, p: torch.nn.Parameter, work: str, variant: str, **numbers: float
) -> Step:
    row = UpdateRow(p.detach(), p.grad, huge_page_zeros(p.numel()), low_of(p, work))
    return lambda: compiled_adam.with_one_state_(
        rule, [row], grad_scale=scale_of(work), variant=variant, **numbers
    )


def low_of(p: torch.nn.Parameter, work: str) -> torch.Tensor | None:
    return p.low if work == "whole" else None


def scale_of(work: str) -> float:
    return 1 / DIVISOR if work == "whole" else 1.0


def in_passes(
    make: Callable[[list], torch.optim.Optimizer], p: torch.nn.Parameter, work: str
) -> Step:
    """Unscaling, update and cast one after the other, each by the fastest means of torch."""
    optimizer = make([p])

    def whole():
        p.grad.mul_(1 / DIVISOR)
        optimizer.step()
        p.low.copy_(p.detach())

    return whole if work == "whole" else optimizer.step


def scaled_inside(
    make: Callable[[list], torch.optim.Optimizer], p: torch.nn.Parameter, work: str
) -> Step:
    """Unscaling inside torch's kernel (its `grad_scale`, which also writes the gradient back), then the cast."""
    optimizer = make([p])

    def whole():
        optimizer.grad_scale = torch.tensor(DIVISOR)
        optimizer.step()
        p.low.copy_(p.detach())

    return whole if work == "whole" else optimizer.step


def deepspeed_adam(params: list) -> torch.optim.Optimizer:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam(params, adamw_mode=True, **ADAM)


def deepspeed_lion(params: list) -> torch.optim.Optimizer:
    from deepspeed.ops.lion import DeepSpeedCPULion

    return DeepSpeedCPULion(params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.1)


def deepspeed_adagrad(params: list) -> torch.optim.Optimizer:
    from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad

    return DeepSpeedCPUAdagrad(params, **ADAGRAD)


ADAM = dict(lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
ADAGRAD = dict(lr=1e-2, eps=1e-10, weight_decay=0.1)
CONTESTS = {
    "adam": Contest(
        28,
        our_adam,
        {
            "torch fused": partial(torch.optim.AdamW, fused=True, **ADAM),
            "deepspeed": deepspeed_adam,
        },
        "torch fused",
    ),
    "lion": Contest(20, our_lion, {"deepspeed": deepspeed_lion}, "deepspeed"),
    "adagrad": Contest(
        20,
        our_adagrad,
        {
            "torch fused": partial(torch.optim.Adagrad, fused=True, **ADAGRAD),
            "deepspeed": deepspeed_adagrad,
        },
        "torch fused",
    ),
}


def contestants(contest: Contest, variants: list[str]) -> dict[str, tuple[bool, Make]]:
    """Name → (on large pages, how to make its step).

    Large pages are this package's way to allocate, so only ours has them.
    """
    found = {f"ours {v}": (True, partial(contest.ours, variant=v)) for v in variants}
    found["ours, small pages"] = False, contest.ours
    for name, make in contest.peers.items():
        try:
            in_passes(make, parameter(64, False), "plain")()
        except Exception as reason:
            print(f"{name} is left out: {type(reason).__name__}: {reason}")
            continue
        found[name] = False, partial(in_passes, make)
        if name == "torch fused":
            found["torch grad_scale"] = False, partial(scaled_inside, make)
    return found


def seconds(step: Step) -> tuple[float, float]:
    """Seconds of a step: (by the clock, of processor time of all threads)."""
    start = time.perf_counter()
    cpu = time.process_time()
    step()
    return time.perf_counter() - start, time.process_time() - cpu


def copy_step(numel: int) -> Step:
    source = huge_page_zeros(numel)
    target = huge_page_zeros(numel)
    return lambda: target.copy_(source)


def measure(
    contest: Contest,
    numel: int,
    threads: int,
    work: str,
    rounds: int,
    variants: list[str],
) -> None:
    torch.set_num_threads(threads)
    arrays = {large: parameter(numel, large) for large in (True, False)}
    steps = {
        name: make(arrays[large], work)
        for name, (large, make) in contestants(contest, variants).items()
    }
    steps["copy"] = copy_step(numel)
    times = {name: [] for name in steps}
    for step in steps.values():
        step()
    for _ in range(rounds):
        for name, step in steps.items():
            times[name].append(seconds(step))
    best = {name: [min(column) for column in zip(*t)] for name, t in times.items()}
    for name, (clock, cpu) in best.items():
        width = 8 if name == "copy" else contest.bytes + LOW_BYTES[work]
        against = [
            f"{b / x:.2f}"
            for b, x in zip(best.get(contest.baseline, (clock, cpu)), (clock, cpu))
        ]
        print(
            f"{threads} thread{'s' * (threads > 1)} | {work} | {name:17s} | {clock * 1e3:6.1f} ms, "
            f"{cpu * 1e3:6.1f} CPU | {numel * width / clock / 1e9:5.1f} GB/s, "
            f"{numel * width / cpu * threads / 1e9:5.1f} by CPU time"
            + (
                ""
                if name == "copy"
                else f" | {against[0]}x {contest.baseline}, {against[1]}x by CPU time"
            ),
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--optimizers", nargs="+", choices=list(CONTESTS), default=list(CONTESTS)
    )
    parser.add_argument("--parameters", type=float, default=100e6)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument(
        "--work", nargs="+", choices=list(LOW_BYTES), default=list(LOW_BYTES)
    )
    parser.add_argument("--rounds", type=int, default=11)
    variants = compiled_adam.variants()
    parser.add_argument("--variants", nargs="+", choices=variants, default=variants[:1])
    arguments = parser.parse_args()
    for name in arguments.optimizers:
        print(f"{name}:")
        for threads in arguments.threads:
            for work in arguments.work:
                measure(
                    CONTESTS[name],
                    int(arguments.parameters),
                    threads,
                    work,
                    arguments.rounds,
                    arguments.variants,
                )


if __name__ == "__main__":
    main()
