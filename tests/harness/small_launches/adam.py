"""AdamW."""

import torch

from megatron_ds.ops.adam import AdamRow, AdamStep
from megatron_ds.ops.gpu import adam_kernels


def launch() -> None:
    """Aligned rows and others, of which one has several chunks; all that is optional, and nothing of it."""
    for dtype in (torch.float32, torch.bfloat16):
        memory = [torch.ones(5000) for _ in range(3)]
        grad, low = torch.ones(5000).to(dtype), torch.zeros(5000, dtype=torch.bfloat16)
        cuts = (0, 3, 1027, 5000)
        rows = [AdamRow(p[a:b], grad[a:b], m[a:b], v[a:b], 1, low[a:b] if dtype == torch.bfloat16 else None)
                for p, m, v in [memory] for a, b in zip(cuts, cuts[1:])]
        numbers = {} if dtype == torch.float32 else {"divisor": torch.ones(()), "skip": torch.zeros(())}
        adam_kernels.adamw(grad, rows, AdamStep(0.1, (0.9, 0.9), 1e-8, 0.1, **numbers))
