"""The mixers of this feature, and which block has which (`models/mixers.py`)."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from ...config.options.model import ModelConfig
from ...models.attention import Rotary
from ...models.block import feed_forward_flops, make_feed_forward
from ...models.core_choice import make_core
from ...models.layer import LayerFlops
from ...models.mixers import SELF_ATTENTION, Attention, HeadSizes, Mixer
from ...mpu.context import ParallelContext
from ...ops.attention_pattern import AttentionPattern
from .delta_net import GatedDeltaNet, delta_sizes
from .gated_attention import GatedSelfAttention
from .half_block import HalfBlock
from .letters import (
    ATTENTION,
    DELTA,
    EXPERTS,
    FEED_FORWARD,
    MAMBA,
    SIDE_BY_SIDE,
)
from .mamba import Mamba, mamba_sizes
from .norms_behind import NormsBehind
from .scan_mixer import MixerSizes
from .side_by_side import SideBySide

ATTENTION_NAMES = ("input_layernorm", "self_attention")
FEED_FORWARD_NAMES = ("pre_mlp_layernorm", "mlp")
# Options of the places of mixers, which `mixer_kinds` has in one spelling.
PLACES = ("linear_attention_freq", "linear_attention_type")


class StateMixer(Mixer):
    """A mixer with a state, by its module and the sizes of its options."""

    def __init__(
        self,
        kind: str,
        begins: str,
        module: Callable[..., Attention],
        sizes: Callable[[ModelConfig], MixerSizes],
    ):
        """begins: of the names of its options."""
        self.kind = kind
        of_options = ModelConfig.__dataclass_fields__
        sizes_named = (
            n for n in of_options if n.startswith(begins) and n not in PLACES
        )
        self.fields = ("mixer_kinds", *sizes_named)
        self.module = module
        self.sizes = sizes

    def rotary(self, config: ModelConfig, shared: Rotary | None) -> Rotary | None:
        """Return None: the state orders the tokens."""
        return None

    def make(
        self,
        config: ModelConfig,
        name: str,
        ctx: ParallelContext,
        *,
        output_std: float,
        **attention: Any,
    ) -> Attention:
        """Build the module of a block. attention: what only attention has."""
        return self.module(config, name, ctx, output_std=output_std)

    def flops(
        self, config: ModelConfig, seq_length: int, pattern: AttentionPattern
    ) -> LayerFlops:
        """Return the products of one sequence, forward and backward."""
        return self.sizes(config).flops(config.hidden_size, seq_length)

    def linear_layers(self, config: ModelConfig) -> Mapping[str, tuple[int, int]]:
        """Return its two projections: channels into and out of each."""
        return self.sizes(config).linear_layers(config.hidden_size)

    def head_sizes(self, config: ModelConfig) -> HeadSizes | None:
        """Return None: a state has no scores."""
        return None


class GatedAttention(Mixer):
    """Self-attention with a gate of its output."""

    kind = "gated_"
    fields = ("attention_output_gate",)

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
        core = make_core(
            config, f"{name}.core_attention", ctx, pattern=pattern, comm_type=comm_type
        )
        return GatedSelfAttention(
            config, name, ctx, output_std=output_std, rotary=rotary, core=core
        )

    def linear_layers(self, config: ModelConfig) -> Mapping[str, tuple[int, int]]:
        """Return the projections, the first of which has gates and a value of each key as wide as it."""
        plain = super().linear_layers(config)
        into, out = plain["linear_qkv"]
        gates = config.num_attention_heads * config.head_dim
        return {**plain, "linear_qkv": (into, out + gates)}


class HalfLayer(Mixer):
    """A layer that is a half of a block: what mixes tokens, or else a feed-forward."""

    def __init__(self, kind: str, inner: Mixer | None):
        """inner: of the tokens; None for a feed-forward."""
        self.kind = f"{kind}_half_"
        self.inner = inner
        self.pasts = 0 if inner is None else inner.pasts
        self.has_feed_forward = inner is None
        of_inner = () if inner is None else inner.fields
        self.fields = tuple(dict.fromkeys(("mixer_pattern", *of_inner)))

    def rotary(self, config: ModelConfig, shared: Rotary | None) -> Rotary | None:
        """Return that of the inner mixer."""
        return None if self.inner is None else self.inner.rotary(config, shared)

    def linear_layers(self, config: ModelConfig) -> Mapping[str, tuple[int, int]]:
        """Return those of the inner mixer; none for a feed-forward."""
        return {} if self.inner is None else self.inner.linear_layers(config)

    def head_sizes(self, config: ModelConfig) -> HeadSizes | None:
        """Return those of the inner mixer; None for a feed-forward."""
        return None if self.inner is None else self.inner.head_sizes(config)

    def block(
        self,
        config: ModelConfig,
        experts: int,
        name: str,
        ctx: ParallelContext,
        *,
        mixer: Mixer,
        **attention: Any,
    ) -> nn.Module:
        """Build the layer."""
        # As many sums as layers, where whole blocks have two each.
        std = config.init_method_std / config.num_layers**0.5
        inner = self.inner
        norm, place = FEED_FORWARD_NAMES if inner is None else ATTENTION_NAMES
        name_of_module = f"{name}.{place}"
        module: Any
        if inner is None:
            module = make_feed_forward(config, experts, name_of_module, ctx, std)
        else:
            module = inner.make(
                config, name_of_module, ctx, output_std=std, **attention
            )
        return HalfBlock(config, name, ctx, norm=norm, place=place, module=module)

    def block_flops(
        self,
        config: ModelConfig,
        experts: int,
        seq_length: int,
        vocab_size: int,
        *,
        pattern: AttentionPattern,
        tiles: int,
        ranks: int,
        mixer: Mixer,
    ) -> LayerFlops:
        """Return the products of one sequence, forward and backward."""
        if self.inner is None:
            return feed_forward_flops(config, experts, seq_length, tiles, ranks)
        return self.inner.flops(config, seq_length, pattern)


DELTA_NET = StateMixer("delta_", "linear_", GatedDeltaNet, delta_sizes)
MAMBA_2 = StateMixer("mamba_", "mamba_", Mamba, mamba_sizes)
GATED_ATTENTION = GatedAttention()
NORMS_BEHIND = NormsBehind()
BESIDE = SideBySide(MAMBA_2.fields)
STATES = {DELTA: DELTA_NET, MAMBA: MAMBA_2, SIDE_BY_SIDE: BESIDE}
HALVES = {
    DELTA: HalfLayer("delta", DELTA_NET),
    MAMBA: HalfLayer("mamba", MAMBA_2),
    ATTENTION: HalfLayer("attention", SELF_ATTENTION),
    FEED_FORWARD: HalfLayer("mlp", None),
    EXPERTS: HalfLayer("experts", None),
}
GATED_HALF = HalfLayer("gated_attention", GATED_ATTENTION)


def mixer_of_block(config: ModelConfig, block: int) -> Mixer | None:
    """Return the mixer of a layer that the options name; None for plain self-attention."""
    letter = config.mixer_kinds[block]
    is_gated = config.attention_output_gate and letter == ATTENTION
    if config.mixer_pattern is not None:
        return GATED_HALF if is_gated else HALVES[letter]
    has_own_norms = config.norms_behind_attention or config.qk_layernorm_of_all_heads
    if has_own_norms and letter == ATTENTION:
        return NORMS_BEHIND
    return GATED_ATTENTION if is_gated else STATES.get(letter)
