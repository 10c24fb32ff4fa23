"""`BlockLayout`: which blocks of keys the blocks of queries of each head see.

Child et al. 2019 (arXiv:1904.10509); layouts of options are those of a feature. An
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
    """Which blocks of keys each head's blocks of queries see. Block i has the positions from i * block on.

    block  positions of a block
    seen   bool [n, blocks, blocks]: of each head, whether a block of queries (row) sees a block of keys; n
           is 1 where all heads have the same
    """

    block: int
    seen: np.ndarray

    @classmethod
    def of(cls, block: int, seen: np.ndarray) -> "BlockLayout":
        """Return a layout of heads [n, blocks, blocks].

        seen: bool; kept once where all heads are alike
        """
        is_alike = bool((seen == seen[:1]).all())
        if is_alike:
            seen = seen[:1]
        return cls(block, np.ascontiguousarray(seen, dtype=bool))

    @property
    def is_alike(self) -> bool:
        """Whether all heads have the same layout, which is kept once."""
        return len(self.seen) == 1

    @property
    def positions(self) -> int:
        """Length of the longest sequence."""
        return self.block * self.seen.shape[1]

    def of_heads(self, heads: range) -> "BlockLayout":
        """Return the layout of some of the heads."""
        if self.is_alike:
            return self
        seen = self.seen[heads.start : heads.stop]
        return BlockLayout.of(self.block, seen)

    @cached_property
    def groups(self) -> list[tuple[list[int], "BlockLayout"]]:
        """(heads, the layout that they share), in the order of their first heads."""
        # Heads by the content of their layouts.
        same: dict[bytes, list[int]] = {}
        for head, seen in enumerate(self.seen):
            same.setdefault(seen.tobytes(), []).append(head)
        groups = []
        for heads in same.values():
            first = self.seen[heads[:1]]
            groups.append((heads, BlockLayout(self.block, first)))
        return groups

    def counts(self, queries: Ends, keys: Ends) -> tuple[np.ndarray, np.ndarray]:
        """Return how much of each part of the queries and of the keys is seen.

        Returns the seen blocks of keys in it, int [n, rows, columns], and all of its blocks, [rows, columns].
        Raises LayoutError for positions that the layout does not have.
        """
        # Blocks of the parts, and the rectangle that holds them all.
        above, below = self._block_ends(queries)
        left, right = self._block_ends(keys)
        top = above.min()
        first = left.min()
        part = self.seen[:, top : below.max(), first : right.max()]
        # Sums over the blocks before each row and column; those of a part are differences of them.
        padded = np.pad(part, ((0, 0), (1, 0), (1, 0)))
        sums = padded.cumsum(1).cumsum(2)
        of_rows = sums[:, below - top] - sums[:, above - top]
        count = of_rows[:, :, right - first] - of_rows[:, :, left - first]
        total = np.outer(below - above, right - left)
        return count, total

    def runs(self, queries: range, keys: range, gap: int) -> Iterator[range]:
        """Parts of these keys that some of the queries see, in some of the heads.

        Parts with fewer than `gap` keys between them are joined. Raises LayoutError for positions that the
        layout does not have.
        """
        if not len(keys):
            return
        rows = self._blocks(queries)
        columns = self._blocks(keys)
        # Numbers of the blocks of keys that are seen.
        is_seen = self.seen[:, rows, columns].any(axis=(0, 1))
        numbers = columns.start + np.flatnonzero(is_seen)
        if not len(numbers):
            return
        # They are cut where the gap between two of them is large.
        largest = max(1, gap // self.block)
        cuts = np.flatnonzero(np.diff(numbers) > largest) + 1
        for run in np.split(numbers, cuts):
            start = int(run[0]) * self.block
            stop = (int(run[-1]) + 1) * self.block
            yield range(max(keys.start, start), min(keys.stop, stop))

    def hidden(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """bool [.., n, q, k], True where a query does not see a key.

        queries: int64 [.., q], keys: int64 [.., k], any positions
        """
        # The blocks of each position; in plans, without values, the layout is not kept.
        rows = queries.div(self.block, rounding_mode="floor")
        columns = keys.div(self.block, rounding_mode="floor")
        if has_memory(queries):
            hidden = self._hidden_on(queries.device)
        else:
            hidden = torch.tensor(~self.seen, device=queries.device)
        # One list of positions for all, or one for each sample.
        if queries.dim() == 1:
            return hidden[:, rows][:, :, columns]
        of_samples = hidden[:, rows[..., :, None], columns[..., None, :]]
        return of_samples.transpose(0, 1)

    def pairs(self, positions: int, is_causal: bool) -> float:
        """Pairs of a query and a key that it sees, the mean over heads.

        Of a causal pattern, half of the blocks on the diagonal count.
        """
        blocks = self._blocks(range(positions))
        seen = self.seen[:, blocks, blocks]
        # Seen blocks of all heads, those on the diagonal half.
        count = seen.sum()
        if is_causal:
            on_diagonal = np.trace(seen, axis1=1, axis2=2).sum()
            count = np.tril(seen, -1).sum() + on_diagonal / 2
        return float(count) * self.block**2 / len(seen)

    def _block_ends(self, parts: Ends) -> Ends:
        """Number of the first block of each part, and the one past its last."""
        starts, stops = parts
        self._check(int(stops.max()))
        first = starts // self.block
        end = -(-stops // self.block)
        return first, end

    def _blocks(self, positions: range) -> slice:
        """Numbers of their blocks. Raises LayoutError for positions that the layout does not have."""
        self._check(positions.stop)
        first = positions.start // self.block
        end = -(-positions.stop // self.block)
        return slice(first, end)

    def _check(self, length: int) -> None:
        """Raises LayoutError for a sequence that is longer than the layout."""
        if length > self.positions:
            raise LayoutError(
                f"a sequence of {length} tokens does not fit a sparse layout of "
                f"{self.positions}. Use a larger --max-position-embeddings."
            )

    def _hidden_on(self, device: torch.device) -> torch.Tensor:
        """Return the blocks that are not seen, kept on each device that asked for them."""
        if device not in self._tensors:
            self._tensors[device] = torch.tensor(~self.seen, device=device)
        return self._tensors[device]

    @cached_property
    def _tensors(self) -> dict[torch.device, torch.Tensor]:
        """Device → the blocks that are not seen, as a tensor there."""
        return {}
