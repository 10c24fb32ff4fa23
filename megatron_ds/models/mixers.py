"""`Mixer`: what fills the slot `attention` of a block, where tokens of a sequence meet.

Self-attention is the mixer of all blocks that no feature gives another. A feature names its own in
`Feature.mixer`, by the options and the number of a block.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from ..batch.batch import Batch
from ..config.options.model import ModelConfig
from ..errors import ConfigError
from ..features import features
from ..mpu.context import ParallelContext
from ..ops.attention_pattern import AttentionPattern
from .attention import Rotary, SelfAttention
from .core_choice import make_core
from .layer import LayerFlops


class Attention(Protocol):
    """What fills the slot, a module. recompute_core: in backward, as `SelfAttention` has it"""

    recompute_core: bool

    def __call__(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """x [s(/t), b, h] → the same shape."""


@dataclass(frozen=True)
class HeadSizes:
    """What the cores of all ranks take: q [.., heads, keys], k [.., groups, keys], v [.., groups, values]."""

    heads: int
    groups: int
    keys: int
    values: int


class Mixer:
    """The interface, and self-attention, by its example.

    kind    begins the kind of a layer with it ("latent_"): layers of one kind cost the same
    fields  options of `ModelConfig` that determine shapes and meaning of its weights, besides those of self-attention
    block   makes a layer that is no whole block, with the arguments of `block.transformer_block`; None: a block
    block_flops  of such a layer, with the arguments of `block.block_flops`
    has_feed_forward  whether a layer with it has a feed-forward too, as a whole block has
    pasts   modules of a layer that keep something of the tokens of generated texts, by `Batch.past`
    """

    kind: str = ""
    fields: tuple[str, ...] = ()
    block: Callable[..., nn.Module] | None = None
    block_flops: Callable[..., LayerFlops] | None = None
    has_feed_forward: bool = True
    pasts: int = 1

    def rotary(self, config: ModelConfig, shared: Rotary | None) -> Rotary | None:
        """Return the rotary embedding that all blocks with this mixer share. shared: that of the model's heads"""
        return shared

    def make(
        self,
        config: ModelConfig,
        name: str,
        ctx: ParallelContext,
        *,
        output_std: float,
        rotary: Rotary | None,
        pattern: AttentionPattern,
        comm_type: str,
    ) -> Attention:
        """Build the module of a block.

        name: global, of the module. output_std: of the weights before the residual sum. rotary: by `rotary`, or
        None for a block without. pattern: which keys a token sees. comm_type: how context-parallel ranks share
        attention, of `context_attention.COMM_TYPES`
        """
        core = make_core(
            config, f"{name}.core_attention", ctx, pattern=pattern, comm_type=comm_type
        )
        return SelfAttention(
            config, name, ctx, output_std=output_std, rotary=rotary, core=core
        )

    def flops(
        self, config: ModelConfig, seq_length: int, pattern: AttentionPattern
    ) -> LayerFlops:
        """Return the products of one sequence, forward and backward."""
        weights = sum(into * out for into, out in self.linear_layers(config).values())
        queries = config.num_attention_heads * config.head_dim
        scores = 12.0 * pattern.pairs(seq_length) * queries
        return LayerFlops(float(seq_length * 6 * weights), scores)

    def linear_layers(self, config: ModelConfig) -> Mapping[str, tuple[int, int]]:
        """Return the linear layers: name → channels into and out of it, of all ranks."""
        h = config.hidden_size
        queries = config.num_attention_heads * config.head_dim
        keys_values = 2 * config.query_groups * config.head_dim
        return {"linear_qkv": (h, queries + keys_values), "linear_proj": (queries, h)}

    def head_sizes(self, config: ModelConfig) -> HeadSizes | None:
        """Return the sizes of its core, by which plans count what ranks send; None for a mixer without scores."""
        d = config.head_dim
        return HeadSizes(config.num_attention_heads, config.query_groups, d, d)


SELF_ATTENTION = Mixer()


def mixer_of(config: ModelConfig, block: int) -> Mixer:
    """Return the mixer of a block, by its number. Raises ConfigError if two features name one of the same sort.

    Attention that a feature gives all blocks is only for those in which no other has a mixer without scores.
    """
    named = (f.mixer(config, block) for f in features() if f.mixer is not None)
    found = [mixer for mixer in named if mixer is not None]
    found = [m for m in found if m.head_sizes(config) is None] or found
    if len(found) > 1:
        kinds = " and ".join(mixer.kind or "attention" for mixer in found)
        raise ConfigError(
            f"block {block} has one mixer, and the options name two ({kinds}). Switch all but one of them off."
        )
    return next(iter(found), SELF_ATTENTION)


def mixers_of(config: ModelConfig) -> Iterator[Mixer]:
    """Yield each mixer of a model's blocks once."""
    yield from dict.fromkeys(mixer_of(config, i) for i in range(config.num_layers))
