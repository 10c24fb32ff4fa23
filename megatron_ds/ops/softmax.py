"""Softmax of attention scores: scaled, masked and causal, with keyed dropout of the probabilities.

Implementations: torch's operations; on a GPU one kernel, which also draws the random numbers.
"""

import math

import torch

from .dropout import KeepMask, apply_mask
from .gpu import softmax_kernels
from .keep_tables import seeds_on, threshold_of
from .kernel_table import FLOATS, GPU, Operation, random_tensors
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
    scores = scores if scale == 1.0 else scores * scale
    hidden = forbidden(*scores.shape[-2:], causal, mask, scores.device)
    if hidden is not None:
        scores = scores.masked_fill(hidden, -math.inf)
    wide = torch.promote_types(scores.dtype, torch.float32)
    if sink is None:
        p = torch.softmax(scores, dim=-1, dtype=wide).to(scores.dtype)
    else:
        column = sink.to(wide).view(-1, 1, 1).expand(*scores.shape[:-1], 1)
        p = (
            torch.cat((scores.to(wide), column), dim=-1)
            .softmax(dim=-1)[..., :-1]
            .to(scores.dtype)
        )
    if hidden is not None and mask is not None:
        p = p.masked_fill(hidden.all(-1, keepdim=True), 0.0)
    return p if keep is None else apply_mask(p, keep.mask, keep.p)


def forbidden(
    sq: int, sk: int, causal: bool, mask: torch.Tensor | None, device: torch.device
) -> torch.Tensor | None:
    """bool, True = may not attend; None when everything may (a single causal query sees all keys)."""
    if not causal or sq == 1:
        return mask
    future = torch.ones(sq, sk, dtype=torch.bool, device=device).triu(1 + sk - sq)
    return future if mask is None else future | mask


masked_softmax.benchmark_sizes = ((2048, 2048), (4096, 4096))  # queries, keys


@masked_softmax.example
def _example(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> tuple:
    (scores,) = random_tensors(dtype, device, (2, 3, rows, width))
    hidden = (
        torch.arange(2 * rows * width, device=device).view(2, 1, rows, width) % 5 == 0
    )
    keys: list[Key] = [(1, "here", sample) for sample in (4, 7)]
    keep = KeepMask(0.3, keys, range(2, 5), range(6, 6 + rows), width, device=device)
    return scores, hidden, width >= rows, 0.6, keep


def _fits(
    scores: torch.Tensor,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    scale: float = 1.0,
    keep: KeepMask | None = None,
    sink: torch.Tensor | None = None,
) -> str:
    if sink is not None:
        return "it has a sink"
    return softmax_kernels.fits(scores, mask, keep is not None)


@masked_softmax.implementation("cuda", devices=GPU, dtypes=FLOATS, fits=_fits)
def _masked_softmax_on_gpu(
    scores: torch.Tensor,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    scale: float = 1.0,
    keep: KeepMask | None = None,
    sink: None = None,
) -> torch.Tensor:
    if (
        keep is not None and keep.picked is not None
    ):  # the columns of a table are not neighbours
        return apply_mask(
            softmax_kernels.masked_softmax(scores, mask, causal, scale),
            keep.mask,
            keep.p,
        )
    table = None
    if keep is not None:
        seeds = seeds_on(scores.device, keep.of_heads)
        table = softmax_kernels.TableDropout(
            seeds, threshold_of(keep.p), keep.rows.start
        )
    return softmax_kernels.masked_softmax(scores, mask, causal, scale, table)
