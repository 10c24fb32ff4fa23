"""Softmax of attention scores: scaled, masked and causal, with keyed dropout of the probabilities.

Implementations: torch's operations; on a GPU one kernel, which also draws the random numbers. Both drop the
same probabilities, since the random numbers are keyed by sample, head, query and column.

Letters: b samples, n heads, sq queries, sk keys.
"""

import math

import torch

from .dropout import KeepMask, apply_mask
from .kernel_table import Operation, random_tensors
from .keyed_random import Key


@Operation
def masked_softmax(
    scores: torch.Tensor,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    scale: float = 1.0,
    keep: KeepMask | None = None,
    sink: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(scale * scores) over the last dim of [b, n, sq, sk], in fp32, rounded to the dtype of scores.

    mask    bool [b or 1, n or 1, sq or 1, sk], True = 0 here
    causal  the queries are the last ones: query i sees the first sk - sq + i + 1 columns
    keep    dropout of the result
    sink    [n], a further score of each head, whose probability is left out of the result

    With a mask, a query that sees no column is 0.
    """
    # Hidden scores are -inf before the softmax.
    if scale != 1.0:
        scores = scores * scale
    queries, columns = scores.shape[-2:]
    hidden = forbidden(queries, columns, causal, mask, scores.device)
    if hidden is not None:
        scores = scores.masked_fill(hidden, -math.inf)
    # In fp32, or in fp64 for such scores.
    wide = torch.promote_types(scores.dtype, torch.float32)
    if sink is None:
        p = torch.softmax(scores, dim=-1, dtype=wide).to(scores.dtype)
    else:
        # The sink is a further column, which is left out of the result.
        column = sink.to(wide).view(-1, 1, 1).expand(*scores.shape[:-1], 1)
        with_sink = torch.cat((scores.to(wide), column), dim=-1)
        p = with_sink.softmax(dim=-1)[..., :-1].to(scores.dtype)
    # A query without a column has NaN so far.
    if hidden is not None and mask is not None:
        p = p.masked_fill(hidden.all(-1, keepdim=True), 0.0)
    if keep is None:
        return p
    return apply_mask(p, keep.mask, keep.p)


def forbidden(
    sq: int, sk: int, causal: bool, mask: torch.Tensor | None, device: torch.device
) -> torch.Tensor | None:
    """bool [.., sq, sk], True = may not attend; None when everything may.

    A single causal query sees all keys.
    """
    if not causal or sq == 1:
        return mask
    everything = torch.ones(sq, sk, dtype=torch.bool, device=device)
    # The diagonal is shifted, since the queries are the last positions of the keys.
    future = everything.triu(1 + sk - sq)
    if mask is None:
        return future
    return future | mask


masked_softmax.benchmark_sizes = (
    (2048, 2048),  # queries, keys
    (4096, 4096),
)


@masked_softmax.example
def _example(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> tuple:
    (scores,) = random_tensors(dtype, device, (2, 3, rows, width))
    # Every fifth column is hidden.
    numbers = torch.arange(2 * rows * width, device=device)
    hidden = numbers.view(2, 1, rows, width) % 5 == 0
    keys: list[Key] = [(1, "here", sample) for sample in (4, 7)]
    keep = KeepMask(0.3, keys, range(2, 5), range(6, 6 + rows), width, device=device)
    return scores, hidden, width >= rows, 0.6, keep
