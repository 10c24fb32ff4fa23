"""`MambaBesideAttention`: Mamba-2 and attention that read the same input and whose outputs are added, as in Falcon-H1,
with factors of its activations in place of other deviations of first weights (`--mixer-multipliers`).
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ...batch.batch import Batch
from ...config.options.model import ModelConfig
from ...models.attention import Rotary
from ...models.block import MLP, Block, make_feed_forward, output_std
from ...models.embedding import scaled
from ...models.layer import LayerFlops
from ...models.mixers import SELF_ATTENTION, Attention, HeadSizes, Mixer
from ...mpu.context import ParallelContext
from ...ops.attention_pattern import AttentionPattern
from .letters import FACTORS
from .mamba import Mamba, mamba_sizes


class Factors(NamedTuple):
    """What activations are multiplied by. parts: z, x, B, C and dt of Mamba-2; in, out: of each mixer."""

    attention_in: float = 1.0
    attention_out: float = 1.0
    mamba_in: float = 1.0
    mamba_out: float = 1.0
    parts: Sequence[float] = (1.0,) * 5
    gate: float = 1.0
    down: float = 1.0

    @classmethod
    def of(cls, config: ModelConfig) -> "Factors":
        """Return those of the options."""
        values = config.mixer_multipliers
        if values is None:
            return cls()
        attention_in, attention_out, mamba_in, mamba_out, *others = values[:FACTORS]
        *parts, gate, down = others
        return cls(
            attention_in, attention_out, mamba_in, mamba_out, tuple(parts), gate, down
        )


class MambaBesideAttention(nn.Module):
    """x [s(/t), b, h] → the same shape, the sum of both mixers."""

    def __init__(self, attention: Attention, mamba: Mamba, factors: Factors):
        super().__init__()
        self.attention = attention
        self.mamba = mamba
        self.factors = factors

    @property
    def recompute_core(self) -> bool:
        """Whether both mixers compute their cores again in backward."""
        return self.mamba.recompute_core

    @recompute_core.setter
    def recompute_core(self, again: bool) -> None:
        self.attention.recompute_core = again
        self.mamba.recompute_core = again

    def forward(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Mix the tokens of x. Collective over tp and cp."""
        factors = self.factors
        mixed = self.mamba(scaled(x, factors.mamba_in), batch)
        attended = self.attention(scaled(x, factors.attention_in), batch)
        return scaled(mixed, factors.mamba_out) + scaled(
            attended, factors.attention_out
        )


class ScaledMLP(MLP):
    """The feed-forward of a block, with factors of its gate and of its output."""

    factors = Factors()

    def of_tile(self, x: torch.Tensor) -> torch.Tensor:
        """Some tokens: x [.., b, h] → the same shape."""
        gate, up = self.linear_fc1(x).chunk(2, -1)
        wide = self.activation(torch.cat((scaled(gate, self.factors.gate), up), -1))
        return scaled(self.linear_fc2(wide), self.factors.down)


class SideBySide(Mixer):
    """Mamba-2 beside attention in the slot of attention."""

    kind = "mamba_beside_"
    pasts = 2

    def __init__(self, fields: tuple[str, ...]):
        """fields: of Mamba-2."""
        self.fields = (*fields, "mixer_multipliers")

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
        """Build the module of a block."""
        attention = SELF_ATTENTION.make(
            config,
            f"{name}.attention",
            ctx,
            output_std=output_std,
            rotary=rotary,
            pattern=pattern,
            comm_type=comm_type,
        )
        mamba = Mamba(config, f"{name}.mamba", ctx, output_std=output_std)
        factors = Factors.of(config)
        mamba.factors = tuple(factors.parts)
        return MambaBesideAttention(attention, mamba, factors)

    def block(  # type: ignore[override]
        self,
        config: ModelConfig,
        experts: int,
        name: str,
        ctx: ParallelContext,
        *,
        mixer: Mixer,
        **attention: Any,
    ) -> Block:
        """Build the block, with the factors of its feed-forward."""
        std = output_std(config)
        place = f"{name}.mlp"
        feed: nn.Module
        if config.mixer_multipliers is None:
            feed = make_feed_forward(config, experts, place, ctx, std)
        else:
            feed = ScaledMLP(config, place, ctx, output_std=std)
            feed.factors = Factors.of(config)
        made = self.make(
            config, f"{name}.self_attention", ctx, output_std=std, **attention
        )
        return Block(config, name, ctx, attention=made, feed_forward=feed)

    def flops(
        self, config: ModelConfig, seq_length: int, pattern: AttentionPattern
    ) -> LayerFlops:
        """Return the products of one sequence, forward and backward."""
        own = SELF_ATTENTION.flops(config, seq_length, pattern)
        other = mamba_sizes(config).flops(config.hidden_size, seq_length)
        return LayerFlops(own.weights + other.weights, own.scores + other.scores)

    def linear_layers(self, config: ModelConfig) -> Mapping[str, tuple[int, int]]:
        """Return those of both mixers."""
        of_mamba = mamba_sizes(config).linear_layers(config.hidden_size)
        return {**SELF_ATTENTION.linear_layers(config), **of_mamba}

    def head_sizes(self, config: ModelConfig) -> HeadSizes | None:
        """Return those of its attention."""
        return SELF_ATTENTION.head_sizes(config)
