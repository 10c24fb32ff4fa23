"""`AttentionPattern`: which keys a query sees, as a function of their positions in the sequence.

Attention asks three questions of it, all answered from positions alone, without a device:

    keys_of(queries)          the range of keys that a range of queries sees, so that others are skipped
    sees_all(queries, keys)   whether each of the queries sees each of the keys, so that no mask is needed
    hidden(queries, keys)     the mask, where neither holds
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class AttentionPattern:
    """By default a query sees itself and all keys before it.

    causal  a query sees no later key
    left    number of keys before its own position that a query sees; None: all
    right   number of keys after it; None: all, or none of a causal pattern
    """

    causal: bool = True
    left: int | None = None
    right: int | None = None

    @property
    def after(self) -> int | None:
        """Number of keys after its own position that a query sees; None: all."""
        return 0 if self.causal else self.right

    @property
    def is_plain(self) -> bool:
        """Whether there is no window: the pattern is causal, or hides nothing."""
        return self.left is None and (self.causal or self.right is None)

    def keys_of(self, queries: range, keys: range) -> range:
        """The part of `keys` from the first to the last that any of the queries sees; maybe empty.

        Both are contiguous positions; `queries` has at least one.
        """
        first = keys.start if self.left is None else max(keys.start, queries.start - self.left)
        stop = keys.stop if self.after is None else min(keys.stop, queries.stop + self.after)
        return range(first, max(first, stop))

    def sees_all(self, queries: range, keys: range) -> bool:
        """Whether every query sees every key; both are contiguous positions."""
        is_before = self.left is None or keys.start >= queries.stop - 1 - self.left
        return is_before and (self.after is None or keys.stop - 1 <= queries.start + self.after)

    def hidden(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor | None:
        """bool [..., q, k], True where a query does not see a key; None if nothing is hidden.

        queries: int64 [..., q], keys: int64 [..., k], any positions
        """
        distance = keys.unsqueeze(-2) - queries.unsqueeze(-1)
        after = None if self.after is None else distance > self.after
        before = None if self.left is None else distance < -self.left
        if after is None or before is None:
            return before if after is None else after
        return after | before


CAUSAL, FULL = AttentionPattern(), AttentionPattern(causal=False)
