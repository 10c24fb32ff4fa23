"""The part of attention that the compiled kernel of CPUs computes, and how partial attention finds that kernel.

The kernel is a module of the wing of kernels (extensions/kernels/cpu/compiled_attention.py) with these functions:

    attention_of_keys             the implementation of `core_attention.attention`
    compiled_attention_not_kept   a block's output, which backward does not keep, and its log-sum-exp
    takes                         whether it takes queries, a pattern and keys of these positions
    attend, add_gradients_        one block, without gradients; the gradients of one block
    row_dots                      D = rowsum(dO ∘ O)

Letters: s positions, b samples, n query heads, d channels.
"""

from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import torch

from ..features import Provided
from .key_visibility import KeyVisibility

ATTENTION_KERNEL: Provided[Any] = Provided("attention kernel")


class ScoreBlock(NamedTuple):
    """Scores to be computed: those of queries and keys at these positions, where the keys are visible."""

    visible: KeyVisibility
    queries: range
    keys: range


class OfRows(NamedTuple):
    """Numbers of each query of each head, fp32 [b, n, sq]: the log-sum-exp, and D = rowsum(dO ∘ O)."""

    lse: torch.Tensor
    dots: torch.Tensor


def places_of(q: torch.Tensor, k: torch.Tensor) -> tuple[range, range]:
    """Positions of the queries [sq, ..], which are the last ones, and of the keys [sk, ..]."""
    sk = k.shape[0]
    return range(sk - q.shape[0], sk), range(sk)


@cache
def attention_kernel() -> ModuleType | None:
    """Return the functions of the compiled kernel; None where the wing of kernels is not installed."""
    return ATTENTION_KERNEL.find()


def row_dots(dout: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """D = rowsum(dO ∘ O) of [s, b, n, d] → fp32 [b, n, s], of an output of the compiled kernel."""
    kernel = attention_kernel()
    assert kernel is not None, "the output is that of the kernel"
    return kernel.row_dots(dout, out)
