"""A transformer block, normalization first: x + attention(norm(x)), then x + feed_forward(norm(x)).

Dropout comes before each sum. With a parallel residual: x + attention(norm(x)) + feed_forward(other norm(x))
(Black et al. 2022, arXiv:2204.06745, section 2.1); with a shared norm both read the first (Wang and Komatsuzaki
2021, GPT-J). Outputs of both halves may be normalized too, before dropout.

`Block` has two slots: attention, a module `forward(x, batch)` that a `Mixer` makes, and feed_forward, a module of the
same call; both take and return [s(/t), b, h]. `Block.run` is how these modules are run: another function with the
same result may take its place.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from ..batch.batch import Batch
from ..config.model_facts import other_models
from ..config.options.model import ModelConfig
from ..errors import ConfigError
from ..mpu.context import ParallelContext, Recompute
from ..ops.activation import ACTIVATIONS
from ..ops.attention_pattern import CAUSAL, FULL, AttentionPattern
from ..ops.norms import Norm
from ..tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from .attention import Rotary, make_window_rotary
from .attention_layouts import attention_layouts
from .embedding import rounded, scaled
from .kept_input import input_keeper
from .layer import HiddenDropout, Layer, LayerFlops, check_divides, pick, recompute
from .mixers import SELF_ATTENTION, Attention, Mixer, mixer_of
from .normalization import make_norm
from .sequence_tiles import in_tiles, number_of_tiles


class Block(nn.Module):
    """x [s(/t), b, h] → the same shape. name: global, of the layer.

    run  (block, x, batch) → the output of the block, without recomputation
    """

    run: Callable[["Block", torch.Tensor, Batch], torch.Tensor]
    self_attention: Attention

    def __init__(
        self,
        config: ModelConfig,
        name: str,
        ctx: ParallelContext,
        *,
        attention: Attention,
        feed_forward: nn.Module,
    ):
        super().__init__()
        # The order of these attributes is the order of the parameters in ZeRO's buckets.
        self.input_layernorm = make_norm(config, f"{name}.input_layernorm", ctx)
        self.self_attention = attention
        norm_after = partial(_norm_after, config, name, ctx)
        self.post_self_attn_layernorm = norm_after("post_self_attn_layernorm")
        self.pre_mlp_layernorm: Norm | None = None
        if not (config.use_parallel_residual and config.shared_block_norm):
            self.pre_mlp_layernorm = make_norm(config, f"{name}.pre_mlp_layernorm", ctx)
        self.mlp = feed_forward
        self.post_mlp_layernorm = norm_after("post_mlp_layernorm")
        self.run = in_parallel if config.use_parallel_residual else in_sequence
        self.attention_dropout = HiddenDropout(
            config.hidden_dropout, f"{name}.self_attention", ctx
        )
        self.mlp_dropout = HiddenDropout(config.hidden_dropout, f"{name}.mlp", ctx)
        self.multiplier = rounded(config.residual_multiplier, ctx.dtype)
        self.keep_input = input_keeper(ctx)
        self.set_recompute(ctx.recompute.granularity)

    def set_recompute(self, granularity: str | None) -> None:
        """What backward computes again: None, "selective" or "full"."""
        self.granularity = Recompute(granularity).granularity
        self.self_attention.recompute_core = granularity == "selective"

    def forward(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Compute the block, in training with its recomputation."""
        if self.granularity == "full":
            run = partial(self.run, self)
            return recompute(run, x, batch, keep=self.keep_input)
        return self.run(self, x, batch)

    def attend(self, normed: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the attention of the normed input, and of it the norm, if there is one, times the factor."""
        out = self.self_attention(normed, batch)
        norm = self.post_self_attn_layernorm
        return scaled(out if norm is None else norm(out), self.multiplier)

    def feed(self, normed: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the feed-forward of the normed input, and of it the norm, if there is one, times the factor."""
        out = self.mlp(normed, batch)
        norm = self.post_mlp_layernorm
        return scaled(out if norm is None else norm(out), self.multiplier)


def in_sequence(block: Block, x: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Run the layers of a block one by one, attention first."""
    attended = block.attend(block.input_layernorm(x), batch)
    norm = block.pre_mlp_layernorm
    assert norm is not None, "only a parallel residual shares the first norm"
    # On a GPU the sum is one kernel with the dropout before it, or else with the norm after it.
    if block.attention_dropout.is_active(batch):
        x = block.attention_dropout.add(attended, x, batch)
        return block.mlp_dropout.add(block.feed(norm(x), batch), x, batch)
    normed, x = norm(attended, x)
    return x + block.feed(normed, batch)


def in_parallel(block: Block, x: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Run a block whose attention and feed-forward read the same input."""
    norm = block.pre_mlp_layernorm
    normed = block.input_layernorm(x)
    attended = block.attend(normed, batch)
    fed = block.feed(normed if norm is None else norm(x), batch)
    total = block.attention_dropout.add(attended, x, batch)
    return block.mlp_dropout.add(fed, total, batch)


def _norm_after(
    config: ModelConfig, name: str, ctx: ParallelContext, leaf: str
) -> Norm | None:
    """Return the norm of the output of a half of the block; None for models without it."""
    if not config.norm_after_sublayer:
        return None
    return make_norm(config, f"{name}.{leaf}", ctx)


def block_layers(
    config: ModelConfig,
    prefix: str,
    ctx: ParallelContext,
    *,
    rotary: Rotary | None,
    causal: bool = True,
) -> list[Layer]:
    """Return the blocks of a transformer, named `prefix`.0, `prefix`.1, …"""
    return [
        block_layer(config, ctx, i, f"{prefix}.{i}", parts=parts, causal=causal)
        for i, parts in enumerate(parts_of_blocks(config, rotary, causal))
    ]


@dataclass(frozen=True)
class BlockParts:
    """What distinguishes one block of a model from the others.

    experts  their number, 0 for a dense feed-forward
    rotary   positions of its heads; None for a block without
    pattern  which keys a token sees
    """

    experts: int
    mixer: Mixer
    rotary: Rotary | None
    pattern: AttentionPattern


def parts_of_blocks(
    config: ModelConfig, rotary: Rotary | None, causal: bool = True
) -> list[BlockParts]:
    """Return the parts of each block. rotary: of the model's heads; mixers with other heads have another"""
    mixers = [mixer_of(config, i) for i in range(config.num_layers)]
    of_mixers = {mixer: mixer.rotary(config, rotary) for mixer in dict.fromkeys(mixers)}
    of_windows = make_window_rotary(config)
    # Each option of the layers is read once.
    columns = zip(
        config.experts,
        mixers,
        patterns(config, causal),
        config.windowed,
        config.unrotated,
        strict=True,
    )
    found = []
    for experts, mixer, pattern, is_windowed, is_unrotated in columns:
        of_block = of_mixers[mixer]
        if is_windowed:
            of_block = of_windows or of_block
        if is_unrotated:
            of_block = None
        found.append(BlockParts(experts, mixer, of_block, pattern))
    return found


def block_layer(
    config: ModelConfig,
    ctx: ParallelContext,
    i: int,
    name: str,
    *,
    parts: BlockParts,
    causal: bool = True,
) -> Layer:
    """Return a block in the place of block i of a transformer, under a name. parts: by `parts_of_blocks`"""
    experts = parts.experts
    mixer = parts.mixer
    pattern = parts.pattern
    # Layers may see different blocks of keys.
    layout = attention_layouts().of_layer(config, name, ctx.seed, causal)
    if layout is not None:
        pattern = replace(pattern, layout=layout)
    # The layer is built later, by the rank that holds it; planning needs its kind and cost only.
    return Layer(
        name,
        partial(
            mixer.block or transformer_block,
            config,
            experts,
            name,
            ctx,
            rotary=parts.rotary,
            pattern=pattern,
            comm_type=ctx.comm_type(i),
            mixer=mixer,
        ),
        mixer.kind + _kind(config, experts, pattern, ctx, i),
        is_block=True,
        recompute=ctx.recompute,
        noun="block with experts" if experts else "",
        flops=partial(
            mixer.block_flops or block_flops,
            config,
            experts,
            pattern=pattern,
            tiles=ctx.mlp_tiles,
            ranks=ctx.cp.size,
            mixer=mixer,
        ),
    )


def patterns(config: ModelConfig, causal: bool) -> list[AttentionPattern]:
    """Return which keys the queries of each block see."""
    whole = CAUSAL if causal else FULL
    left, right = (
        None if side == -1 else side for side in config.window_size or (-1, -1)
    )
    window = AttentionPattern(causal, left, None if causal else right)
    return [window if has_window else whole for has_window in config.windowed]


def _kind(
    config: ModelConfig,
    experts: int,
    pattern: AttentionPattern,
    ctx: ParallelContext,
    layer: int,
) -> str:
    """Layers of one kind cost the same: where numbers of experts differ, they are part of the name, and so
    is how context-parallel ranks share attention."""
    is_pyramid = len({number for number in config.experts if number}) > 1
    kind = "moe_block" if experts else "block"
    if experts and is_pyramid:
        kind = f"{kind}_{experts}"
    if pattern.layout is not None:
        kind = f"sparse_{kind}"
    elif not pattern.is_plain:
        kind = f"windowed_{kind}"
    if config.unrotated[layer]:
        kind = f"unrotated_{kind}"
    return kind if len(set(ctx.cp_comm_type)) == 1 else f"{kind}_{ctx.comm_type(layer)}"


def transformer_block(
    config: ModelConfig,
    experts: int,
    name: str,
    ctx: ParallelContext,
    *,
    rotary: Rotary | None,
    pattern: AttentionPattern = CAUSAL,
    comm_type: str = "p2p",
    mixer: Mixer = SELF_ATTENTION,
) -> Block:
    """Return the block of a transformer: attention, or another mixer, and a feed-forward, dense or of some experts.

    comm_type: how context-parallel ranks share attention, of `context_attention.COMM_TYPES`

    Raises ConfigError if experts choose tokens of a causal model, whose later tokens would move the choice.
    """
    if (
        experts
        and pattern.causal
        and "expert_choice" in config.moe_router_load_balancing_type
    ):
        raise ConfigError(
            "--moe-router-load-balancing-type expert_choice compares each token with later "
            "ones of its sequence, which a causal model may not see. Use "
            f"aux_loss{other_models()}."
        )
    # Both halves end in a layer with this deviation, as their outputs are summed over the blocks.
    std = output_std(config)
    attention = mixer.make(
        config,
        f"{name}.self_attention",
        ctx,
        output_std=std,
        rotary=rotary,
        pattern=pattern,
        comm_type=comm_type,
    )
    feed_forward = make_feed_forward(config, experts, f"{name}.mlp", ctx, std)
    return Block(config, name, ctx, attention=attention, feed_forward=feed_forward)


def make_feed_forward(
    config: ModelConfig,
    experts: int,
    name: str,
    ctx: ParallelContext,
    output_std: float,
) -> nn.Module:
    """Return the feed-forward of a layer: of so many experts, or dense."""
    make = partial(_with_experts, experts) if experts else MLP
    return make(config, name, ctx, output_std=output_std)


def _with_experts(
    experts: int,
    config: ModelConfig,
    name: str,
    ctx: ParallelContext,
    *,
    output_std: float,
) -> nn.Module:
    from ..moe.mixture import MixtureOfExperts

    dense = None
    width = config.dense_width
    if width:
        part = "mlp" if config.mlp_type == "residual" else "shared_experts"
        dense = MLP(config, f"{name}.{part}", ctx, output_std=output_std, width=width)
    return MixtureOfExperts(
        config, experts, name, ctx, output_std=output_std, dense=dense
    )


class MLP(nn.Module):
    """The feed-forward half of a block: h → f → h, x [s(/t), b, h] → [s(/t), b, h].

    A gated activation takes [gate; up], so its fc1 has twice the rows, in two parts.
    """

    def __init__(
        self,
        config: ModelConfig,
        name: str,
        ctx: ParallelContext,
        *,
        output_std: float,
        width: int | None = None,
    ):
        """width: f; None for the model's."""
        super().__init__()
        # Ranks hold equal parts of the width.
        width = config.ffn_size if width is None else width
        check_divides(
            "ffn_hidden_size", width, ctx.tp, "each rank holds an equal part of it"
        )
        # Gated activations need several parts of the first product.
        activation = pick(ACTIVATIONS, "activation", config.activation)
        self.activation = activation.bound()
        parts = activation.parts
        self.linear_fc1 = ColumnParallelLinear(
            config.hidden_size,
            parts * width,
            ctx,
            name=f"{name}.linear_fc1",
            init_std=config.init_method_std,
            bias=config.add_bias_linear,
            parts=parts,
        )
        self.linear_fc2 = RowParallelLinear(
            width,
            config.hidden_size,
            ctx,
            name=f"{name}.linear_fc2",
            init_std=output_std,
            bias=config.add_bias_linear,
        )
        self.tiles = ctx.mlp_tiles
        self.ranks = ctx.slice.tensor.size

    def forward(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """x [s(/t), b, h] → the same shape, in `ctx.mlp_tiles` tiles. `batch` is not used."""
        if self.tiles == 1:
            return self.of_tile(x)
        tiles = number_of_tiles(self.tiles, len(x) * self.ranks, x.shape[-1])
        return in_tiles(self.of_tile, x, list(self.parameters()), min(tiles, len(x)))

    def of_tile(self, x: torch.Tensor) -> torch.Tensor:
        """Some tokens: x [.., b, h] → the same shape."""
        wide = self.activation(self.linear_fc1(x))  # [s, b, f/t]
        return self.linear_fc2(wide)


def output_std(config: ModelConfig) -> float:
    """Initial standard deviation of the weights before a sum (Radford et al. 2019, section 2.3)."""
    return config.init_method_std / (2 * config.num_layers) ** 0.5


def block_flops(
    config: ModelConfig,
    experts: int,
    seq_length: int,
    vocab_size: int,
    *,
    pattern: AttentionPattern = CAUSAL,
    tiles: int = 1,
    ranks: int = 1,
    mixer: Mixer = SELF_ATTENTION,
) -> LayerFlops:
    """Megatron's formula for a transformer block; causal attention counts half of its full matrix, and a
    window the scores within it.

    tiles: of a dense feed-forward, as in `ParallelContext.mlp_tiles`, on each of so many context-parallel `ranks`
    """
    mixed = mixer.flops(config, seq_length, pattern)
    fed = feed_forward_flops(config, experts, seq_length, tiles, ranks)
    return LayerFlops(mixed.weights + fed.weights, mixed.scores, fed.again)


def feed_forward_flops(
    config: ModelConfig, experts: int, seq_length: int, tiles: int = 1, ranks: int = 1
) -> LayerFlops:
    """Return the products of a feed-forward. One of experts counts the k of a token, its dense part, and the router."""
    width = config.ffn_size
    if experts:
        width = config.moe_router_topk * config.expert_ffn_size + config.dense_width
    products = width * (3 if config.is_gated else 2) + experts
    weights = float(seq_length * 6 * config.hidden_size * products)
    has_tiles = number_of_tiles(tiles, seq_length // ranks, config.hidden_size) > 1
    return LayerFlops(weights, again=weights / 3 if has_tiles else 0.0)
