"""The log-sum-exp of the rows of partial attention: rows without keys, and the merging of two parts.

Shapes: outputs [b, n, rows, d], log-sum-exps fp32 [b, n, rows]. Formulas: `partial_attention`.
"""

import math

import torch


def with_empty_rows(sums: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return the sums with -inf for rows without keys, where torch's fused kernels have another number.

    bias: [b or 1, n or 1, rows, columns], -inf where a key is hidden; None: all rows have keys
    """
    if bias is None:
        return sums
    is_empty = bias.amax(-1) == -math.inf
    return sums.masked_fill(is_empty, -math.inf)


def merge_(
    out: torch.Tensor, sums: torch.Tensor, more: torch.Tensor, more_sums: torch.Tensor
) -> None:
    """Merge another part into `out` and its log-sum-exp, in place. A part without keys has -inf."""
    # exp(more_sums - both), exactly 1 for the first part
    weight = torch.sigmoid(more_sums - sums)
    weight.masked_fill_(more_sums == -math.inf, 0.0)
    out.lerp_(more.float(), weight.unsqueeze(-1))
    torch.logaddexp(sums, more_sums, out=sums)


def finite(sums: torch.Tensor) -> torch.Tensor:
    """Return the sums with 0 for a row without keys, so that exponentials of its scores are 0 instead of NaN."""
    is_empty = sums == -math.inf
    return sums.masked_fill(is_empty, 0.0)
