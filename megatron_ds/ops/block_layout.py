"""`BlockLayout`: which blocks of keys the blocks of queries of each head see.

Child et al. 2019 (arXiv:1904.10509); in DeepSpeed "sparse attention". `sparse_layouts.py` makes layouts. An
`AttentionPattern` may hide more, such as later keys within a block.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from ..errors import LayoutError
from .meta_tensors import has_memory

# of some parts of a sequence: the first position of each, and the one past its last
Ends = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True, eq=False)
class BlockLayout:
    """Block i has the positions from i * block on.

    block  positions of a block
    seen   bool [n, blocks, blocks]: of each head, whether a block of queries (row) sees a block of keys; n
           is 1 where all heads have the same
    """

    block: int
    seen: np.ndarray

    @classmethod
    def of(cls, block: int, seen: np.ndarray) -> "BlockLayout":
        """A layout of heads [n, blocks, blocks]; kept once where all are alike."""
        alike = bool((seen == seen[:1]).all())
        return cls(block, np.ascontiguousarray(seen[:1] if alike else seen, dtype=bool))

    @property
    def is_alike(self) -> bool:
        """Whether all heads have the same."""
        return len(self.seen) == 1

    @property
    def positions(self) -> int:
        """Longest sequence."""
        return self.block * self.seen.shape[1]

    def of_heads(self, heads: range) -> "BlockLayout":
        """The layout of some of the heads."""
        return (
            self
            if self.is_alike
            else BlockLayout.of(self.block, self.seen[heads.start : heads.stop])
        )

    @cached_property
    def groups(self) -> list[tuple[list[int], "BlockLayout"]]:
        """(heads, the layout that they share), in the order of their first heads."""
        same: dict[bytes, list[int]] = {}
        for head, seen in enumerate(self.seen):
            same.setdefault(seen.tobytes(), []).append(head)
        return [
            (heads, BlockLayout(self.block, self.seen[heads[:1]]))
            for heads in same.values()
        ]

    def counts(self, queries: Ends, keys: Ends) -> tuple[np.ndarray, np.ndarray]:
        """Seen blocks of keys in each part of the queries and of the keys, int [n, rows, columns], and all of
        its blocks, [rows, columns]. Raises LayoutError for positions that the layout does not have."""
        (above, below), (left, right) = (self._block_ends(t) for t in (queries, keys))
        top = above.min()
        first = left.min()
        part = self.seen[:, top : below.max(), first : right.max()]
        # sums over the blocks before each row and column
        sums = np.pad(part, ((0, 0), (1, 0), (1, 0))).cumsum(1).cumsum(2)
        of_rows = sums[:, below - top] - sums[:, above - top]
        count = of_rows[:, :, right - first] - of_rows[:, :, left - first]
        return count, np.outer(below - above, right - left)

    def runs(self, queries: range, keys: range, gap: int) -> Iterator[range]:
        """Parts of these keys that some of the queries see, in some of the heads; those with fewer than `gap`
        keys between them are joined."""
        if not len(keys):
            return
        rows, columns = (self._blocks(positions) for positions in (queries, keys))
        numbers = columns.start + np.flatnonzero(
            self.seen[:, rows, columns].any(axis=(0, 1))
        )
        cuts = np.flatnonzero(np.diff(numbers) > max(1, gap // self.block)) + 1
        for run in np.split(numbers, cuts) if len(numbers) else ():
            yield range(
                max(keys.start, int(run[0]) * self.block),
                min(keys.stop, (int(run[-1]) + 1) * self.block),
            )

    def hidden(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """bool [.., n, q, k], True where a query does not see a key.

        queries: int64 [.., q], keys: int64 [.., k], any positions
        """
        rows, columns = (
            t.div(self.block, rounding_mode="floor") for t in (queries, keys)
        )
        hidden = (
            self._hidden_on(queries.device)
            if has_memory(queries)
            else torch.tensor(~self.seen, device=queries.device)
        )
        if queries.dim() == 1:
            return hidden[:, rows][:, :, columns]
        return hidden[:, rows[..., :, None], columns[..., None, :]].transpose(0, 1)

    def pairs(self, positions: int, is_causal: bool) -> float:
        """Pairs of a query and a key that it sees, the mean over heads; of blocks on the diagonal of a causal
        pattern half."""
        blocks = self._blocks(range(positions))
        seen = self.seen[:, blocks, blocks]
        if is_causal:
            earlier = (
                np.tril(seen, -1).sum() + np.trace(seen, axis1=1, axis2=2).sum() / 2
            )
            return float(earlier) * self.block**2 / len(seen)
        return float(seen.sum()) * self.block**2 / len(seen)

    def _block_ends(self, parts: Ends) -> Ends:
        """Number of the first block of each part, and the one past its last."""
        starts, stops = parts
        self._check(int(stops.max()))
        return starts // self.block, -(-stops // self.block)

    def _blocks(self, positions: range) -> slice:
        """Numbers of their blocks. Raises LayoutError for positions that the layout does not have."""
        self._check(positions.stop)
        return slice(positions.start // self.block, -(-positions.stop // self.block))

    def _check(self, length: int) -> None:
        if length > self.positions:
            raise LayoutError(
                f"a sequence of {length} tokens does not fit a sparse layout of "
                f"{self.positions}. Use a larger --max-position-embeddings."
            )

    def _hidden_on(self, device: torch.device) -> torch.Tensor:
        if device not in self._tensors:
            self._tensors[device] = torch.tensor(~self.seen, device=device)
        return self._tensors[device]

    @cached_property
    def _tensors(self) -> dict[torch.device, torch.Tensor]:
        return {}
