"""`KeyRows`: queries that each attend to a row of keys of its own, up to a position of its own."""

from dataclasses import dataclass, field

import torch

from .attention_pattern import FULL, AttentionPattern
from .key_visibility import KeyVisibility


@dataclass(frozen=True, eq=False)
class KeyRows:
    """b queries, and the first `length` positions of b rows of keys.

    places    int64 [b, 1], the position of each query; its row has no keys behind it
    length    of the longest row: 1 + the largest of the places
    is_alike  all queries are at the last position, so that nothing is hidden but by a window
    """

    places: torch.Tensor
    length: int
    is_alike: bool
    _known: dict[AttentionPattern, KeyVisibility] = field(default_factory=dict)

    def visible(self, pattern: AttentionPattern) -> KeyVisibility:
        """Return what the queries see; one object for all layers of a pattern."""
        if self.is_alike:
            return KeyVisibility(pattern)
        if pattern not in self._known:
            hidden = pattern.mask(self.places, self.keys)
            self._known[pattern] = KeyVisibility(FULL, mask=hidden)
        return self._known[pattern]

    @property
    def keys(self) -> torch.Tensor:
        """int64 [1, length], the positions of the keys."""
        return torch.arange(self.length, device=self.places.device)[None]
