"""Queries, keys and values as batches of matrices, one for each key-value head of each sample.

s positions, b samples, n query heads, g key-value heads, r = n/g queries that share a key, d channels.
"""

import torch


def query_view(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """[s, b, n, d] → [b g, s, r, d], heads in front; k has g heads."""
    heads = q.shape[1] * k.shape[2]
    return (
        q.flatten(1, 2).unflatten(1, (heads, q.shape[2] // k.shape[2])).transpose(0, 1)
    )


def key_view(k: torch.Tensor) -> torch.Tensor:
    """[s, b, g, d] → [b g, s, d]."""
    return k.flatten(1, 2).transpose(0, 1)


def heads_first(tile: torch.Tensor) -> torch.Tensor:
    """[heads, B, r, d] → [heads, r B, d]; a view when r = 1."""
    return tile.transpose(1, 2).flatten(1, 2)


def rows_first(tile: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """[heads, r B, d] → [heads, B, r, d], r as in `like`; a view."""
    return tile.unflatten(1, (like.shape[2], -1)).transpose(1, 2)


def samples_of(some: slice, heads: int, samples: int) -> slice:
    """The samples to which these of all `heads` belong; the heads of a sample lie together."""
    groups = heads // samples
    return slice(some.start // groups, (some.stop - 1) // groups + 1)
