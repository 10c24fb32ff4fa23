"""Cross entropy of a rank's columns."""

import torch

from megatron_ds.extensions.kernels.gpu.cross_entropy_kernels import (
    cross_entropy_facts,
    cross_entropy_gradient_,
)


def launch() -> None:
    """Rows that begin anywhere, padding, labels elsewhere, a row without gradient, long rows."""
    for dtype, columns in (
        (torch.float32, 19),
        (torch.bfloat16, 83),
        (torch.float16, 4200),
    ):
        logits, labels = (
            torch.randn(4, columns).to(dtype),
            torch.tensor([0, columns - 1, -3, columns + 5]),
        )
        facts = cross_entropy_facts(logits, labels, columns - 2, True)
        dloss = torch.tensor([1.0, 0.0, 0.5, 2.0])
        cross_entropy_gradient_(logits, labels, facts[0], dloss, columns - 2, 0.9, 0.1)
