"""Tensors of heads whose widths differ, for kernels that take one width.

Channels that are zero in queries and keys, or in values, change neither scores nor results, and their gradients are
left out.
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F


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
