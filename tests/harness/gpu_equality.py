"""Training of a tiny GPT on one GPU beside the same on the CPU: the cases, and what must agree.

`tests/gpu/test_one_gpu.py` runs all cases on a device; `tests/kernels/test_gpu_rehearsal.py` some of them on
a GPU that does not exist (fake_cuda.py), so that this code runs in every test run.
"""

import math
from dataclasses import dataclass

import torch

from megatron_ds.config import parse
from megatron_ds.mpu.grid import Grid
from megatron_ds.mpu.mesh import Mesh
from megatron_ds.ops import kernel_table
from tests.harness.layout_comparison import (
    Difference,
    difference,
    merge,
    parse_layout,
    random_samples,
    train_layout,
)
from tests.harness.tiny_jobs import SEQ_LENGTH, VOCAB, tiny_job

STEPS, BATCH, LAYERS = 8, 4, 2
# Of the largest relative differences between a GPU and a CPU. fp32: sums are in another order, and Adam's
# first steps divide by tiny numbers. 16 bits: each order and each kernel rounds differently, and eight steps
# amplify it.
LIMITS = {
    "fp32": Difference(loss=1e-5, grad_norm=1e-4, weights=1e-3),
    "bf16": Difference(loss=2e-3, grad_norm=1e-1, weights=2e-1),
    "fp16": Difference(loss=5e-4, grad_norm=2e-2, weights=5e-2),
}
MOE = ("--num-experts", "4", "--moe-router-topk", "2", "--moe-aux-loss-coeff", "0.01")
LORA = ("--lora-rank", "4")
QLORA = (*LORA, "--lora-base-bits", "4")
# The first two steps overflow; three good ones later the scale grows, and a step overflows again.
OVERFLOWS = (
    "--initial-loss-scale",
    str(2**20),
    "--hysteresis",
    "1",
    "--loss-scale-window",
    "3",
)


@dataclass(frozen=True)
class Case:
    """A run of one process. layout: as of tools/compare_layouts.py. skips: steps overflow and are skipped."""

    layout: str = "dp=1"
    dtype: str = "fp32"
    style: str = "gpt2"
    dropout: float = 0.1
    more: tuple[str, ...] = ()
    skips: bool = False


CASES = {
    "gpt2": Case(),
    "llama": Case(style="llama"),
    "gpt2 bf16": Case(dtype="bf16"),
    "llama bf16": Case(dtype="bf16", style="llama", dropout=0.0),
    "llama fp16": Case(dtype="fp16", style="llama"),
    "torch's operations": Case(more=("--kernels", "torch")),
    "loss scaling": Case(dtype="fp16", more=OVERFLOWS, skips=True),
    "loss scaling, offloaded": Case(
        "zero=1,offload=cpu", "fp16", more=OVERFLOWS, skips=True
    ),
    "optimizer offloaded": Case("zero=1,offload=cpu"),
    "half offloaded": Case("zero=2,offload=cpu,ratio=0.5", "bf16"),
    "weights offloaded": Case("zero=3,offload=cpu,offload_param=cpu", "bf16", "llama"),
    "recomputed": Case(more=("--recompute-granularity", "full")),
    "experts": Case(style="llama", dropout=0.0, more=MOE),
    "adapters": Case(dropout=0.0, more=LORA),
    "adapters of an encoded base": Case(dtype="bf16", dropout=0.0, more=QLORA),
}


def train(case: Case, device: torch.device, more: tuple[str, ...] = ()) -> tuple:
    """((trace, weights), model section) of the case on a device."""
    request = parse_layout(case.layout, mbs="2")
    flags = [
        *tiny_job(case.style, case.dtype, False, case.dropout, LAYERS, BATCH, STEPS),
        *request.flags,
    ]
    config = parse([*flags, *case.more, *more], world_size=1)
    mesh = Mesh(Grid.fit(1), 0, lambda *args: None, device)
    samples = random_samples(4 * BATCH, SEQ_LENGTH, VOCAB, seed=1)
    with kernel_table.selected("auto"):  # the run selects its own; afterwards as before
        return merge([train_layout(config, mesh, STEPS, samples)]), config.model


def check(case: Case, there: tuple, here: tuple) -> None:
    """The loss curve and the weights of two results of `train` agree, and so do skipped steps."""
    ((trace, weights), model), ((trace0, weights0), _) = there, here
    skipped, skipped0 = (
        [not math.isfinite(norm) for norm in t.grad_norms] for t in (trace, trace0)
    )
    assert skipped == skipped0, (skipped, skipped0)
    assert sum(skipped) == 3 * case.skips, skipped
    assert trace0.losses[-1] < trace0.losses[0] and len(trace.losses) == STEPS
    for t in (trace, trace0):
        t.grad_norms[:] = [norm for norm in t.grad_norms if math.isfinite(norm)]
    found = difference((trace, weights), (trace0, weights0), model)
    assert found.is_within(LIMITS[case.dtype]), found
