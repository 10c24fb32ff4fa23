"""`SparseLayouts`: the `AttentionLayouts` of the mode that `--sparse-attention` names."""

from typing import TYPE_CHECKING

from ...config.options.model import ModelConfig
from ...models.attention_layouts import AttentionLayouts
from .sparse_options import OF_MODE, SPARSE_FIELDS

if TYPE_CHECKING:
    from ...ops.block_layout import BlockLayout

GLOBAL_INDICES = "global_block_indices"


class SparseLayouts(AttentionLayouts):
    """Layouts of `SparseOptions`. Shorter sequences than the longest have its first blocks."""

    fields = SPARSE_FIELDS

    def of_layer(
        self, config: ModelConfig, name: str, seed: int, causal: bool
    ) -> "BlockLayout | None":
        """Return the layout of a layer, whose random blocks follow from the seed and its name."""
        if config.sparse_attention is None:
            return None
        from .sparse_layouts import block_layout, has_random_blocks

        key = (seed, name) if has_random_blocks(config) else ()
        return block_layout(
            config, config.positions, config.num_attention_heads, causal, *key
        )

    def block_length(self, config: ModelConfig) -> int:
        return config.sparse_block if config.sparse_attention else 1

    def least_length(self, config: ModelConfig) -> int:
        if GLOBAL_INDICES not in OF_MODE.get(config.sparse_attention, ()):
            return 1
        return (max(config.sparse_global_block_indices) + 1) * config.sparse_block


def sparse_layouts() -> AttentionLayouts:
    """Return the layouts of the modes."""
    return SparseLayouts()
