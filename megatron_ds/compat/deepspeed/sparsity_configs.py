"""`SparsityConfig` and its classes: DeepSpeed's layouts of sparse attention, as tensors of 0 and 1.

    FixedSparsityConfig(num_heads=4, block=16).make_layout(1024)     int64 [4, 64, 64]

The blocks are those of DeepSpeed, bit by bit: random ones are drawn from Python's `random`, so the same
`random.seed` gives the same layout. Blocks have all of their pairs: within a block on the diagonal a token
sees later ones, also of a "unidirectional" layout; give an `attn_mask` to hide them.

Arguments have the names and defaults of DeepSpeed. The layouts themselves are those of
`extensions/sparse_layouts`.
"""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ...errors import ConfigError
from ...features import Provided, missing_wings

ATTENTION_OPTIONS: Provided[Any] = Provided("attention options")
LAYOUTS_OF_HEADS: Provided[Any] = Provided("layouts of heads")  # by modes

UNI = "unidirectional"
BI = "bidirectional"


class SparsityConfig:
    """What all layouts have. A subclass of a program's own defines `make_layout(seq_len)`.

    num_heads                   heads of the layer
    block                       tokens of a block
    different_layout_per_head   whether each head has its own layout; else all have that of the first
    """

    def __init__(
        self, num_heads: int, block: int = 16, different_layout_per_head: bool = False
    ):
        self.num_heads = num_heads
        self.block = block
        self.different_layout_per_head = different_layout_per_head
        self.num_layout_heads = num_heads if different_layout_per_head else 1

    def setup_layout(self, seq_len: int) -> torch.Tensor:
        """Zeros, int64 [heads, blocks, blocks]. Raises ConfigError unless blocks divide the length."""
        if seq_len % self.block:
            raise ConfigError(
                f"a sequence of {seq_len} tokens does not divide into blocks of {self.block}: a layout has whole "
                "blocks. Pad it with SparseAttentionUtils.pad_to_block_size."
            )
        blocks = seq_len // self.block
        return torch.zeros((self.num_heads, blocks, blocks), dtype=torch.int64)

    def check_and_propagate_first_head_layout(
        self, layout: torch.Tensor
    ) -> torch.Tensor:
        """Return the layout [heads, blocks, blocks], with that of the first head for all unless heads differ."""
        if not self.different_layout_per_head:
            layout[1:] = layout[0]
        return layout

    def make_layout(self, seq_len: int) -> torch.Tensor:
        """Return int64 [heads, blocks, blocks], 1 where a block of queries (row) sees a block of keys."""
        raise NotImplementedError(
            f"{type(self).__name__} has no make_layout(seq_len). Define it, or use one of the classes below it."
        )

    @property
    def is_random(self) -> bool:
        """Whether the layout has random blocks, which differ between processes."""
        return getattr(self, "num_random_blocks", 0) > 0


class _PatternConfig(SparsityConfig):
    """A layout of a mode of `extensions/sparse_layouts`.

    mode         its name there
    is_trimmed   whether DeepSpeed leaves out all blocks above the diagonal of a unidirectional layout
    """

    mode = "dense"
    is_trimmed = False
    attention = BI

    def make_layout(self, seq_len: int) -> torch.Tensor:
        """int64 [heads, blocks, blocks], 1 where a block of queries (row) sees a block of keys.

        Raises ConfigError where the layout does not fit the length.
        """
        layout = self.setup_layout(seq_len)
        blocks = layout.shape[1]
        self._check(blocks)
        make = _found(LAYOUTS_OF_HEADS)[self.mode]
        options = _found(ATTENTION_OPTIONS)(
            sparse_attention=self.mode, sparse_block=self.block, **self._options(blocks)
        )
        is_causal = self.attention == UNI
        for head in range(self.num_layout_heads):
            seen = make(options, blocks, head, is_causal, self._draw(blocks))
            seen = np.tril(seen) if is_causal and self.is_trimmed else seen
            layout[head] = torch.from_numpy(seen.astype(np.int64))
        return self.check_and_propagate_first_head_layout(layout)

    def _options(self, blocks: int) -> dict[str, Any]:
        """Fields of `SparseOptions`."""
        return {}

    def _check(self, blocks: int) -> None:
        """Raises ConfigError where a row has too few blocks."""
        for name in (
            "num_random_blocks",
            "num_sliding_window_blocks",
            "num_global_blocks",
        ):
            wanted = getattr(self, name, 0)
            if wanted > blocks and self.mode != "fixed":
                raise ConfigError(
                    f"{type(self).__name__}({name}={wanted}): a sequence of {blocks * self.block} tokens has only "
                    f"{blocks} blocks of {self.block}. Use longer sequences, smaller blocks, or fewer of them."
                )

    def _draw(self, blocks: int) -> Any:
        """Return the random blocks of a row, drawn as DeepSpeed draws them."""
        drawn: int = getattr(self, "num_random_blocks", 0)
        return lambda head, row, candidates, count: np.array(
            random.sample(range(candidates), drawn), dtype=np.int64
        )


class DenseSparsityConfig(_PatternConfig):
    """All blocks."""


class FixedSparsityConfig(_PatternConfig):
    """Windows that do not overlap, and some blocks of each that all see (Child et al. 2019)."""

    mode = "fixed"

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        num_local_blocks: int = 4,
        num_global_blocks: int = 1,
        attention: str = BI,
        horizontal_global_attention: bool = False,
        num_different_global_patterns: int = 1,
    ):
        super().__init__(num_heads, block, different_layout_per_head)
        self.num_local_blocks = num_local_blocks
        self.num_global_blocks = num_global_blocks
        self.attention = _direction(attention, horizontal_global_attention)
        self.horizontal_global_attention = horizontal_global_attention
        self.num_different_global_patterns = num_different_global_patterns
        self._check_window()

    def _check_window(self) -> None:
        """Raises ConfigError where global blocks and patterns do not fit into a window."""
        size = self.num_local_blocks
        shared = self.num_global_blocks
        turns = self.num_different_global_patterns
        if size % shared:
            raise ConfigError(
                f"num_local_blocks={size} is not a multiple of num_global_blocks={shared}: the global blocks are an "
                "equal part of each window. Change one of them."
            )
        if turns > 1 and not self.different_layout_per_head:
            raise ConfigError(
                f"num_different_global_patterns={turns} gives heads different layouts, but all heads have the same. "
                "Set different_layout_per_head=True."
            )
        if turns > size // shared:
            raise ConfigError(
                f"num_different_global_patterns={turns} is more than the {size // shared} places of global blocks "
                f"in a window of {size}. Use at most {size // shared}."
            )

    def _options(self, blocks: int) -> dict[str, Any]:
        return {
            "sparse_num_local_blocks": self.num_local_blocks,
            "sparse_num_global_blocks": self.num_global_blocks,
            "sparse_num_different_global_patterns": self.num_different_global_patterns,
            "sparse_horizontal_global_attention": self.horizontal_global_attention,
        }


class VariableSparsityConfig(_PatternConfig):
    """Windows of several sizes, given global blocks, and random ones.

    The random blocks of a unidirectional layout may be later ones, as in DeepSpeed.
    """

    mode = "variable"

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        num_random_blocks: int = 0,
        local_window_blocks: Sequence[int] = (4,),
        global_block_indices: Sequence[int] = (0,),
        global_block_end_indices: Sequence[int] | None = None,
        attention: str = BI,
        horizontal_global_attention: bool = False,
    ):
        super().__init__(num_heads, block, different_layout_per_head)
        self.num_random_blocks = num_random_blocks
        self.local_window_blocks = local_window_blocks
        _check_runs(global_block_indices, global_block_end_indices)
        self.global_block_indices = global_block_indices
        self.global_block_end_indices = global_block_end_indices
        self.attention = _direction(attention, horizontal_global_attention)
        self.horizontal_global_attention = horizontal_global_attention

    def _options(self, blocks: int) -> dict[str, Any]:
        return {
            "sparse_num_random_blocks": self.num_random_blocks,
            "sparse_local_window_blocks": tuple(self.local_window_blocks),
            "sparse_horizontal_global_attention": self.horizontal_global_attention,
            **_runs(self, blocks),
        }

    def _draw(self, blocks: int) -> Any:
        return lambda head, row, candidates, count: np.array(
            random.sample(range(blocks), self.num_random_blocks), dtype=int
        )


class BigBirdSparsityConfig(_PatternConfig):
    """A sliding window, the first blocks, and random ones (Zaheer et al. 2020)."""

    mode = "bigbird"
    is_trimmed = True

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        num_random_blocks: int = 1,
        num_sliding_window_blocks: int = 3,
        num_global_blocks: int = 1,
        attention: str = BI,
    ):
        super().__init__(num_heads, block, different_layout_per_head)
        self.num_random_blocks = num_random_blocks
        self.num_sliding_window_blocks = num_sliding_window_blocks
        self.num_global_blocks = num_global_blocks
        self.attention = _direction(attention)

    def _options(self, blocks: int) -> dict[str, Any]:
        return {
            "sparse_num_random_blocks": self.num_random_blocks,
            "sparse_num_sliding_window_blocks": self.num_sliding_window_blocks,
            "sparse_num_global_blocks": self.num_global_blocks,
        }

    def _check(self, blocks: int) -> None:
        super()._check(blocks)
        if self.attention == UNI and self.num_random_blocks > 1:
            raise ConfigError(
                f"BigBirdSparsityConfig(num_random_blocks={self.num_random_blocks}, attention={UNI!r}): the first "
                "row has one block to choose from. Use num_random_blocks=1."
            )


class BSLongformerSparsityConfig(_PatternConfig):
    """A sliding window, and given global blocks (Beltagy et al. 2020)."""

    mode = "bslongformer"
    is_trimmed = True

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        num_sliding_window_blocks: int = 3,
        global_block_indices: Sequence[int] = (0,),
        global_block_end_indices: Sequence[int] | None = None,
        attention: str = BI,
    ):
        super().__init__(num_heads, block, different_layout_per_head)
        self.num_sliding_window_blocks = num_sliding_window_blocks
        _check_runs(global_block_indices, global_block_end_indices)
        self.global_block_indices = global_block_indices
        self.global_block_end_indices = global_block_end_indices
        self.attention = _direction(attention)

    def _options(self, blocks: int) -> dict[str, Any]:
        return {
            "sparse_num_sliding_window_blocks": self.num_sliding_window_blocks,
            **_runs(self, blocks),
        }


class LocalSlidingWindowSparsityConfig(_PatternConfig):
    """A sliding window."""

    mode = "local"
    is_trimmed = True

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        num_sliding_window_blocks: int = 3,
        attention: str = UNI,
    ):
        super().__init__(num_heads, block)
        self.num_sliding_window_blocks = num_sliding_window_blocks
        self.attention = _direction(attention)

    def _options(self, blocks: int) -> dict[str, Any]:
        return {"sparse_num_sliding_window_blocks": self.num_sliding_window_blocks}


def _found(provided: Provided[Any]) -> Any:
    """Return what the wing of sparse layouts provides. Raises ConfigError where it is not installed."""
    found = provided.find()
    if found is None:
        raise ConfigError(
            f"sparse attention has no layouts in this package.{missing_wings()}"
        )
    return found


def _direction(attention: str, is_horizontal: bool = False) -> str:
    """Return the direction. Raises ConfigError for another word, and where global blocks would see later ones."""
    if attention not in (UNI, BI):
        raise ConfigError(f"attention={attention!r}: it is {UNI!r} or {BI!r}.")
    if is_horizontal and attention == UNI:
        raise ConfigError(
            f"horizontal_global_attention=True shows later blocks to global ones, which attention={UNI!r} excludes. "
            "Remove one of them."
        )
    return attention


def _check_runs(starts: Sequence[int], ends: Sequence[int] | None) -> None:
    """Raises ConfigError where runs of global blocks do not end after they start."""
    if ends is None:
        return
    if len(starts) != len(ends):
        raise ConfigError(
            f"global_block_end_indices has {len(ends)} ends for the {len(starts)} starts of global_block_indices. "
            "Give as many."
        )
    for start, end in zip(starts, ends):
        if start >= end:
            raise ConfigError(
                f"a run of global blocks starts at {start} and ends at {end}: ends are exclusive, so a single block n "
                "is from n to n + 1."
            )


def _runs(config: Any, blocks: int) -> dict[str, Any]:
    """Return the runs of global blocks, as fields of `SparseOptions`; those past the last block are empty."""
    starts = config.global_block_indices
    ends = config.global_block_end_indices
    if ends is None:
        starts = [start + blocks if start < 0 else start for start in starts]
    return {
        "sparse_global_block_indices": tuple(starts),
        "sparse_global_block_end_indices": None if ends is None else tuple(ends),
    }
