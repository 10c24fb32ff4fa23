"""`KeyVisibility`: which keys a query sees. Each kernel of attention, and each planner of its work, reads it.

    pattern     by position: causal, a window, or a layout of blocks
    documents   keys of its own document only
    mask        what a batch hides in addition, such as padding

Scores are another subject (`scoring.Scoring`), as is dropout of probabilities. `hidden` has the elements; which
blocks of them have to be computed, `visible_blocks` finds on the host.
"""

from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch

from .attention_pattern import CAUSAL, FULL, AttentionPattern


@dataclass(frozen=True, eq=False)
class KeyVisibility:
    """By default a query sees itself and all keys before it.

    pattern    by positions, or by blocks of the heads that attend
    documents  `batch.documents.Documents` of the samples: a query sees keys of its own one only; None: of all
    mask       bool [b or 1, n or 1, s or 1, s], True where a query does not see a key; None: nothing more. It may
               have rows only for the queries that attend
    """

    pattern: AttentionPattern = CAUSAL
    documents: Any = None
    mask: torch.Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether it is a causal pattern, or none, and nothing else."""
        return self.pattern.is_plain and self.documents is None and self.mask is None

    @property
    def hides_by_key(self) -> bool:
        """Whether the mask hides the same keys from all queries and heads of a sample, as padding does."""
        return self.mask is None or self.mask.shape[1:3] == (1, 1)

    @property
    def boundaries(self) -> tuple[tuple[int, ...], ...] | None:
        """Where documents begin in each sample; None without documents, and where theirs are unknown."""
        return None if self.documents is None else self.documents.boundaries

    @property
    def is_known(self) -> bool:
        """Whether the host knows all that is hidden: the pattern and the boundaries of documents."""
        is_apart = self.documents is not None
        return self.mask is None and not (is_apart and self.boundaries is None)

    def hidden(
        self, queries: range, keys: range, device: torch.device | str = "cpu"
    ) -> torch.Tensor | None:
        """bool [b or 1, n or 1, q, k], True where a query does not see a key; None: nowhere."""
        masks = [self._by_position(queries, keys, device)]
        rows = slice(queries.start, queries.stop)
        columns = slice(keys.start, keys.stop)
        if self.documents is not None:
            masks.append(self._foreign(rows, columns))
        if self.mask is not None:
            has_these = self.mask.shape[2] in (1, len(queries))
            masks.append(self.mask[:, :, slice(None) if has_these else rows, columns])
        # A mask that is alone is not copied: layers share it.
        given = [mask for mask in masks if mask is not None]
        return reduce(torch.bitwise_or, given) if given else None

    def hidden_besides_later(
        self, queries: range, keys: range, device: torch.device | str = "cpu"
    ) -> torch.Tensor | None:
        """`hidden` for a function that hides later keys itself where the pattern is causal.

        What it has besides are the keys outside of a window or a layout, of other documents, and of the mask.
        """
        pattern = FULL if self.pattern.is_plain else self.pattern
        return replace(self, pattern=pattern).hidden(queries, keys, device)

    def _by_position(
        self, queries: range, keys: range, device: torch.device | str
    ) -> torch.Tensor | None:
        if self.pattern == FULL:
            return None
        of_queries, of_keys = (
            torch.arange(run.start, run.stop, device=device) for run in (queries, keys)
        )
        return self.pattern.mask(of_queries, of_keys)

    def _foreign(self, rows: slice, columns: slice) -> torch.Tensor:
        """bool [b, 1, q, k], True where the key belongs to another document than the query."""
        ids = self.documents.ids
        if rows == columns == slice(0, ids.shape[1]):
            return self.documents.foreign
        return (ids[:, rows, None] != ids[:, None, columns])[:, None]


CAUSAL_KEYS = KeyVisibility()
