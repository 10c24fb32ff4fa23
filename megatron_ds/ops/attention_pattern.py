"""`AttentionPattern`: which keys a query sees, as a function of their positions in the sequence.

Attention asks two questions of it, answered from positions alone, without a device:

    keys_of(queries)          the range of keys that a range of queries sees, so that others are skipped
    hidden(queries, keys)     the mask, where some of them are hidden

Whether a mask is needed at all, `visible_blocks.visible_blocks` finds for many ranges at a time.
A layout of blocks may hide more, of each head other keys; then `mask` has all that is hidden.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch

from .block_layout import BlockLayout


@dataclass(frozen=True)
class AttentionPattern:
    """By default a query sees itself and all keys before it.

    causal  a query sees no later key
    left    number of keys before its own position that a query sees; None: all
    right   number of keys after it; None: all, or none of a causal pattern
    layout  blocks of keys that blocks of queries see, of the n heads that attention is called with
    """

    causal: bool = True
    left: int | None = None
    right: int | None = None
    layout: BlockLayout | None = None

    @property
    def after(self) -> int | None:
        """Number of keys after its own position that a query sees; None: all."""
        return 0 if self.causal else self.right

    @property
    def is_plain(self) -> bool:
        """Whether there is no window and no layout: the pattern is causal, or hides nothing."""
        return (
            self.layout is None
            and self.left is None
            and (self.causal or self.right is None)
        )

    def of_heads(self, heads: range) -> "AttentionPattern":
        """Return the pattern of some of the heads of the layout; the same object for the same heads."""
        return (
            self
            if self.layout is None or self.layout.is_alike
            else _of_heads(self, heads)
        )

    def pairs(self, s: int) -> float:
        """Pairs of a query and a key that it sees, among s positions; a causal pattern has half of them, as
        in Megatron's formula of FLOPs, which counts half of the diagonal."""
        before = 0 if self.left is None else max(0, s - self.left - 1)
        after = 0 if self.after is None else max(0, s - self.after - (self.after > 0))
        if self.layout is not None:
            return self.layout.pairs(s, self.causal)
        return s * s - (before * before + after * after) / 2

    def pairs_between(self, queries: range, keys: range) -> float:
        """Pairs of these queries and keys that are seen, by position alone: a layout hides nothing here. A query and
        its own key are half a pair of a causal pattern, as in `pairs`."""
        places = np.arange(queries.start, queries.stop)
        first = np.full_like(places, keys.start)
        if self.left is not None:
            first = np.maximum(first, places - self.left)
        stop = np.full_like(places, keys.stop)
        if self.after is not None:
            stop = np.minimum(stop, places + self.after + 1)
        seen = int(np.maximum(stop - first, 0).sum())
        if not self.causal:
            return float(seen)
        own = range(max(queries.start, keys.start), min(queries.stop, keys.stop))
        return seen - len(own) / 2

    def keys_of(self, queries: range, keys: range) -> range:
        """Return the part of `keys` from the first to the last that any of the queries sees; maybe empty.

        Both are contiguous positions; `queries` has at least one.
        """
        first = (
            keys.start
            if self.left is None
            else max(keys.start, queries.start - self.left)
        )
        stop = (
            keys.stop
            if self.after is None
            else min(keys.stop, queries.stop + self.after)
        )
        return range(first, max(first, stop))

    def hidden(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor | None:
        """bool [..., q, k], True where a query does not see a key; None if nothing is hidden. Without layout.

        queries: int64 [..., q], keys: int64 [..., k], any positions
        """
        distance = keys.unsqueeze(-2) - queries.unsqueeze(-1)
        after = None if self.after is None else distance > self.after
        before = None if self.left is None else distance < -self.left
        if after is None or before is None:
            return before if after is None else after
        return after | before

    def mask(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor | None:
        """bool [b or 1, n or 1, q, k], True where a query does not see a key; None if nothing is hidden.

        queries: int64 [q] or [b, q], keys: int64 [k] or [b, k], any positions
        """
        hidden = self.hidden(queries, keys)
        hidden = None if hidden is None else hidden.unsqueeze(-3)
        if self.layout is not None:
            closed = self.layout.hidden(queries, keys)
            hidden = closed if hidden is None else closed | hidden
        return hidden if hidden is None or hidden.dim() == 4 else hidden[None]


@lru_cache(maxsize=1024)
def _of_heads(pattern: AttentionPattern, heads: range) -> AttentionPattern:
    assert pattern.layout is not None, "the caller has looked"
    return replace(pattern, layout=pattern.layout.of_heads(heads))


CAUSAL = AttentionPattern()
FULL = AttentionPattern(causal=False)
