"""Cross entropy of a rank's columns in one reading of the logits forward, and one backward:
csrc/gpu/cross_entropy.cu.
"""

import torch

from .gpu_kernel import GpuKernel, type_name

FACTS = GpuKernel("cross_entropy.cu", "cross_entropy_facts", "ptr ptr ptr ptr ptr i64 i32")
GRADIENT = GpuKernel("cross_entropy.cu", "cross_entropy_gradient", "ptr ptr ptr ptr i64 i32 i32 f32 f32")
THREADS = 256                                  # of a block, which has a row
MOST_COLUMNS, MOST_ROWS = 2**30, 2**31


def fits(logits: torch.Tensor, labels: torch.Tensor, valid: int) -> str:
    """"" if the kernels take these logits [n, columns]."""
    rows, columns = logits.shape
    if rows >= MOST_ROWS or columns >= MOST_COLUMNS:
        return f"{rows} rows of {columns} columns are too many"
    return ""


class LogitsKept:
    """An `ops.partial_cross_entropy.PartialCrossEntropy` that keeps the logits as they are until backward,
    and 12 bytes a row.

    logits [n, columns] fp32, bf16 or fp16, with any distance of rows; labels int64 [n].
    """

    def __init__(self, logits: torch.Tensor, labels: torch.Tensor, valid: int):
        self.logits = logits if logits.stride(-1) == 1 else logits.contiguous()
        self.labels, self.valid = labels, valid
        self.lse: torch.Tensor | None = None

    def facts(self, smoothed: bool) -> torch.Tensor:
        """See `PartialCrossEntropy.facts`."""
        x = self.logits
        facts = x.new_empty(3 if smoothed else 2, len(x), dtype=torch.float32)
        FACTS((type_name(x), THREADS), len(x), THREADS, x, self.labels, facts[0], facts[1],
              facts[2] if smoothed else None, x.stride(0), self.valid)
        return facts

    def settle(self, lse: torch.Tensor) -> None:
        """See `PartialCrossEntropy.settle`."""
        self.lse = lse

    def gradient_(self, dloss: torch.Tensor, on_label: float, on_all: float) -> torch.Tensor:
        """See `PartialCrossEntropy.gradient_`."""
        x = self.logits
        GRADIENT((type_name(x), THREADS), len(x), THREADS, x, self.labels, self.lse,
                 dloss.contiguous(), x.stride(0), self.valid, x.shape[1], on_label, on_all)
        return x
