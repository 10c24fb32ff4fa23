"""Cross entropy of a rank's columns in one reading of the logits forward, and one backward:
csrc/gpu/cross_entropy.cu.
"""

import torch

from ....ops import logits as ops_logits
from ....ops.kernel_table import FLOATS, GPU
from .gpu_kernel import GpuKernel, type_name

THREADS = 256  # of a block, which has a row
MOST_COLUMNS = 2**30
MOST_ROWS = 2**31
TYPICAL = [("bf16", THREADS), ("float", THREADS), ("fp16", THREADS)]

FACTS = GpuKernel(
    "cross_entropy.cu", "cross_entropy_facts", "ptr ptr ptr ptr ptr i64 i32", TYPICAL
)
GRADIENT = GpuKernel(
    "cross_entropy.cu",
    "cross_entropy_gradient",
    "ptr ptr ptr ptr i64 i32 i32 f32 f32",
    TYPICAL,
)


def fits(logits: torch.Tensor, *_: object) -> str:
    """ "" if the kernels take these logits [n, columns], which may begin anywhere and lie apart."""
    rows, columns = logits.shape
    if rows >= MOST_ROWS or columns >= MOST_COLUMNS:
        return f"{rows} rows of {columns} columns are too many"
    if logits.stride(1) != 1 and columns > 1:
        return "the elements of a row do not lie side by side"
    return ""


def cross_entropy_facts(
    logits: torch.Tensor, labels: torch.Tensor, valid: int, smoothed: bool
) -> torch.Tensor:
    """`ops.logits.cross_entropy_facts`."""
    facts = logits.new_empty(3 if smoothed else 2, len(logits), dtype=torch.float32)
    FACTS(
        (type_name(logits), THREADS),
        len(logits),
        THREADS,
        logits,
        labels.contiguous(),
        facts[0],
        facts[1],
        facts[2] if smoothed else None,
        logits.stride(0),
        valid,
    )
    return facts


def cross_entropy_gradient_(
    logits: torch.Tensor,
    labels: torch.Tensor,
    lse: torch.Tensor,
    dloss: torch.Tensor,
    valid: int,
    on_label: float,
    on_all: float,
) -> torch.Tensor:
    """`ops.logits.cross_entropy_gradient_`."""
    GRADIENT(
        (type_name(logits), THREADS),
        len(logits),
        THREADS,
        logits,
        labels.contiguous(),
        lse.contiguous(),
        dloss.contiguous(),
        logits.stride(0),
        valid,
        logits.shape[1],
        on_label,
        on_all,
    )
    return logits


_LIMITS = {"devices": GPU, "dtypes": FLOATS, "fits": fits}
ops_logits.cross_entropy_facts.kernel("cuda", **_LIMITS)(cross_entropy_facts)
ops_logits.cross_entropy_gradient_.kernel("cuda", **_LIMITS)(cross_entropy_gradient_)
