"""Tensors of heads whose widths differ, for kernels that take one width.

Channels that are zero in queries and keys, or in values, change neither scores nor results, and their gradients are
left out.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from .scoring import PLAIN, Scoring


def padded(
    attention: Callable[..., torch.Tensor],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *visible: Any,
    scoring: Scoring = PLAIN,
    **settings: Any,
) -> torch.Tensor:
    """Return the attention of heads that are filled up to one width: q [sq, b, n, d], v [sk, b, g, w] → [sq, b, n * w].

    attention, visible, scoring, settings: `core_attention.attention` and its arguments
    """
    if v.shape[3] > q.shape[3]:
        scoring = replace(scoring, scale=scoring.scale_of(q.shape[3]))
    out = attention(*alike(q, k, v), *visible, scoring=scoring, **settings)
    of_heads = out.unflatten(2, (q.shape[2], -1))
    return narrowed((of_heads,), (v,))[0].flatten(2)


def alike(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors [.., d] with zeros behind their last dimension, up to the largest d of them.

    Those that have this width already are returned as they are.
    """
    width = max(t.shape[-1] for t in tensors)
    return [_up_to(t, width) for t in tensors]


def narrowed(
    wide: Iterable[torch.Tensor], like: Iterable[torch.Tensor]
) -> list[torch.Tensor]:
    """Return the first channels of each tensor [.., d], as many as the other of its pair has. Views."""
    found = []
    for t, other in zip(wide, like, strict=True):
        found.append(t[..., : other.shape[-1]])
    return found


def _up_to(t: torch.Tensor, width: int) -> torch.Tensor:
    missing = width - t.shape[-1]
    if missing == 0:
        return t
    return F.pad(t, (0, missing))
