"""`KVCache`: the keys and values of the tokens already seen, so that generating one token costs one token.

    offset   0        3        4         the prompt is appended at once, then one position per generated token
    rows     [k0 k1 k2][k3][k4] . . .    preallocated to `max_length`
"""

from collections.abc import Iterable

import torch
from torch import nn

from ..errors import ConfigError


class KVCache:
    """Keys and values of one attention layer on one rank: each [max_length, b, g / t, d], filled up to
    `offset`."""

    def __init__(self, max_length: int, batch_size: int, num_groups: int, head_dim: int, *,
                 dtype: torch.dtype, device: torch.device):
        self.keys = torch.empty(max_length, batch_size, num_groups, head_dim, dtype=dtype, device=device)
        self.values = torch.empty_like(self.keys)
        self.offset = 0

    def append(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store k, v [s, b, g/t, d] of the next s positions; views of all so far, [offset + s, b, g/t, d].

        The views are overwritten in place by later calls after a `reset`. Raises ConfigError when the cache
        is full.
        """
        stop = self.offset + k.shape[0]
        if stop > len(self.keys):
            raise ConfigError(f"position {stop - 1} does not fit a cache of {len(self.keys)} positions: the "
                              "text is longer than the cache. Generate fewer tokens, or make the cache "
                              "longer.")
        self.keys[self.offset:stop] = k
        self.values[self.offset:stop] = v
        self.offset = stop
        return self.keys[:stop], self.values[:stop]

    def reset(self, offset: int = 0) -> None:
        """Drop all but the first `offset` positions."""
        self.offset = min(self.offset, offset)


def make_caches(modules: Iterable[nn.Module], batch_size: int, max_length: int) -> dict[str, KVCache]:
    """An empty cache for each layer that has one (a part with `new_cache`), keyed by layer name."""
    return {module.layer_name: part.new_cache(batch_size, max_length)
            for module in modules for part in module.modules() if hasattr(part, "new_cache")}
