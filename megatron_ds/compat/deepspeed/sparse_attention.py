"""`SparseSelfAttention` and `BertSparseSelfAttention`: DeepSpeed's modules, over this package's attention.

    scores = (query keyᵀ / sqrt(d)) + rpe + masks,  softmax over the keys of the blocks that the layout has

Without masks and `rpe` the blocks that a layout leaves out are not computed, where a kernel can skip them
(docs/reference/kernels.md); with them the scores of all pairs are computed and masked. Any number format
works, not fp16 alone.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ...errors import ConfigError
from ...ops.attention_pattern import AttentionPattern
from ...ops.block_layout import BlockLayout
from ...ops.core_attention import attention
from ...ops.key_visibility import KeyVisibility
from .sparsity_configs import FixedSparsityConfig, SparsityConfig

MODES = ("add", "mul")


class SparseSelfAttention(nn.Module):
    """Attention of the blocks of a layout, without parameters.

    sparsity_config        the layout; None: `FixedSparsityConfig` of 4 heads
    key_padding_mask_mode  "add": the mask is added to scores; "mul": keys where it is 0 are hidden
    attn_mask_mode         the same of `attn_mask`
    max_seq_length         tokens of the longest sequence; shorter ones have the first blocks of its layout

    A layout with random blocks is that of rank 0 on all ranks: the first forward broadcasts it.
    """

    master_layout: torch.Tensor

    def __init__(
        self,
        sparsity_config: SparsityConfig | None = None,
        key_padding_mask_mode: str = "add",
        attn_mask_mode: str = "mul",
        max_seq_length: int = 2048,
    ):
        super().__init__()
        for mode in (key_padding_mask_mode, attn_mask_mode):
            if mode not in MODES:
                raise ConfigError(f"a mask has the mode {mode!r}: it is add or mul.")
        self.sparsity_config: SparsityConfig = sparsity_config or FixedSparsityConfig(
            num_heads=4
        )
        self.key_padding_mask_mode = key_padding_mask_mode
        self.attn_mask_mode = attn_mask_mode
        self.register_buffer(
            "master_layout", self.sparsity_config.make_layout(max_seq_length)
        )
        self._is_shared = not getattr(self.sparsity_config, "is_random", True)
        self._of_length: dict[int, BlockLayout] = {}
        self.register_load_state_dict_post_hook(_forget)

    def get_layout(self, length: int) -> torch.Tensor:
        """int64 [heads, blocks, blocks] of a sequence, on the CPU. Collective in the first call.

        Raises ConfigError for a length that is too long, or not a multiple of the block.
        """
        self._share()
        block = self.sparsity_config.block
        longest = self.master_layout.shape[-1] * block
        if length % block or length > longest:
            raise ConfigError(
                f"a sequence of {length} tokens does not fit a layout of blocks of {block}, at most {longest} "
                "tokens. Pad it with SparseAttentionUtils.pad_to_block_size, or use a larger max_seq_length."
            )
        blocks = length // block
        return self.master_layout[..., :blocks, :blocks].cpu()

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rpe: torch.Tensor | None = None,
        key_padding_mask: torch.Tensor | None = None,
        attn_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[b, n, s, d] each → [b, n, s, d]. A key of shape [b, n, d, s] is transposed.

        rpe               added to scores, [b or 1, n or 1, s, s]
        key_padding_mask  of keys, [b, s], also with dimensions of 1 between
        attn_mask         of pairs, [s, s]
        """
        # Shapes.
        length = query.shape[2]
        if key.shape[2] != length:
            key = key.transpose(2, 3)
        if not query.shape == key.shape == value.shape:
            shapes = [list(t.shape) for t in (query, key, value)]
            raise ConfigError(
                f"query, key and value have the shapes {shapes}: sparse attention is self-attention, so they are "
                "alike."
            )
        heads = self.master_layout.shape[0]
        if query.shape[1] != heads:
            raise ConfigError(
                f"{query.shape[1]} heads, but the layout is of {heads}. Set num_heads of the sparsity config."
            )
        layout = self._layout(length)
        # Masks.
        masks = [None if rpe is None else rpe]
        if key_padding_mask is not None:
            of_keys = key_padding_mask.reshape(query.shape[0], 1, 1, length)
            masks.append(_added(of_keys, self.key_padding_mask_mode))
        if attn_mask is not None:
            pairs = attn_mask.reshape(1, 1, length, length)
            masks.append(_added(pairs, self.attn_mask_mode))
        given = [mask for mask in masks if mask is not None]
        if given:
            return _masked(query, key, value, layout, given)
        # The blocks alone, by the kernel that suits.
        visible = KeyVisibility(AttentionPattern(causal=False, layout=layout))
        inner = (t.permute(2, 0, 1, 3) for t in (query, key, value))
        out = attention(*inner, visible)
        return out.unflatten(-1, (heads, -1)).permute(1, 2, 0, 3)

    def _layout(self, length: int) -> BlockLayout:
        if length not in self._of_length:
            seen = self.get_layout(length).bool().numpy()
            self._of_length[length] = BlockLayout.of(self.sparsity_config.block, seen)
        return self._of_length[length]

    def _share(self) -> None:
        """Give all ranks the layout of rank 0, once."""
        if not self._is_shared and dist.is_initialized():
            dist.broadcast(self.master_layout, src=0)
            self._is_shared = True


class BertSparseSelfAttention(nn.Module):
    """The self-attention of BERT with a sparse layout: projections, then `SparseSelfAttention`.

    config  has hidden_size and num_attention_heads
    """

    def __init__(self, config: Any, sparsity_config: SparsityConfig | None = None):
        super().__init__()
        hidden = config.hidden_size
        heads = config.num_attention_heads
        if hidden % heads:
            raise ConfigError(
                f"hidden_size {hidden} is not divisible by the {heads} attention heads. Change one of them."
            )
        self.num_attention_heads = heads
        self.attention_head_size = hidden // heads
        self.all_head_size = hidden
        self.query = nn.Linear(hidden, hidden)
        self.key = nn.Linear(hidden, hidden)
        self.value = nn.Linear(hidden, hidden)
        longest = _whole_blocks(config, sparsity_config)
        self.sparse_self_attention = SparseSelfAttention(
            sparsity_config, max_seq_length=longest
        )

    def transpose_for_scores(self, x: torch.Tensor) -> torch.Tensor:
        """[b, s, h] → [b, n, s, d]"""
        return x.unflatten(-1, (self.num_attention_heads, -1)).transpose(1, 2)

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[b, s, h] → [b, s, h]. attention_mask: added to the scores of keys, [b, 1, 1, s] or [b, s]"""
        projections = (self.query, self.key, self.value)
        inner = (self.transpose_for_scores(p(hidden_states)) for p in projections)
        out = self.sparse_self_attention(*inner, key_padding_mask=attention_mask)
        return out.transpose(1, 2).flatten(2)


def _whole_blocks(config: Any, sparsity_config: SparsityConfig | None) -> int:
    """Tokens of the longest sequence: DeepSpeed's 2048, or the model's positions where it has more."""
    positions = max(2048, getattr(config, "max_position_embeddings", 0))
    block = 16 if sparsity_config is None else sparsity_config.block
    return -(-positions // block) * block


def _forget(module: SparseSelfAttention, _: Any) -> None:
    """Layouts follow from the buffer, which a state dict has replaced."""
    module._of_length.clear()


def _added(mask: torch.Tensor, mode: str) -> torch.Tensor:
    """Return what a mask adds to scores."""
    if mode == "add":
        return mask
    hidden = torch.zeros(mask.shape, device=mask.device)
    return hidden.masked_fill(mask == 0, -torch.inf)


def _masked(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: BlockLayout,
    masks: list[torch.Tensor],
) -> torch.Tensor:
    """Attention with all scores, [b, n, s, d]."""
    places = torch.arange(query.shape[2], device=query.device)
    closed = layout.hidden(places, places)
    first, *others = (mask.to(query.dtype) for mask in masks)
    bias = sum(others, first).masked_fill(closed, -torch.inf)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
