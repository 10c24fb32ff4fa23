"""Attention of OLMo-Hybrid: blocks with norms behind both halves and none before them, and norms of all heads of
queries, and of keys, together.

    x + norm(attention(x)), then x + norm(feed_forward(x))       (OLMo et al. 2024, arXiv:2501.00656, section 3)
"""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ...batch.batch import Batch
from ...config.options.model import ModelConfig
from ...models.attention import Rotary, SelfAttention
from ...models.block import Block, make_feed_forward, output_std
from ...models.core_choice import make_core
from ...models.mixers import Attention, Mixer
from ...mpu.context import ParallelContext, new_parameter
from ...mpu.param_spec import Init, ParamSpec, Split
from ...mpu.regions import copy_to_region, reduce_from_region
from ...ops.attention_pattern import AttentionPattern


class NormOfAllHeads(nn.Module):
    """x [s, b, heads/t, d] → the same shape, divided by the root of the mean square of all heads of a token.

    Collective over tp: ranks hold some heads each, and add their squares. heads: of all ranks
    """

    def __init__(
        self, config: ModelConfig, heads: int, name: str, ctx: ParallelContext
    ):
        super().__init__()
        self.tp = ctx.tp
        self.eps = config.norm_epsilon
        self.channels = heads * config.head_dim
        spec = ParamSpec(
            f"{name}.weight",
            (self.channels,),
            Init("ones"),
            splits=(Split("tp", 0),),
            decay=config.apply_wd_to_qk_layernorm,
        )
        self.weight = new_parameter(
            spec, sizes={"tp": ctx.tp.size}, dtype=ctx.dtype, device=ctx.device
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize x, in fp32."""
        wide = x.float()
        squares = wide.square().sum((-2, -1), keepdim=True)
        # Every rank divides its heads by the sum of all, so its gradient has a part of each rank.
        total = copy_to_region(reduce_from_region(squares, self.tp), self.tp)
        normed = wide * torch.rsqrt(total / self.channels + self.eps)
        weight = self.weight.float().view(x.shape[2:])
        return (normed * weight).to(x.dtype)


class WidelyNormedAttention(SelfAttention):
    """`SelfAttention` whose queries, and keys, have one norm of all heads."""

    def __init__(
        self, config: ModelConfig, name: str, ctx: ParallelContext, **settings: Any
    ):
        """settings: of `SelfAttention`."""
        super().__init__(config, name, ctx, **settings)
        heads = config.num_attention_heads
        groups = config.query_groups
        self.q_layernorm = NormOfAllHeads(config, heads, f"{name}.q_layernorm", ctx)  # type: ignore[assignment]
        self.k_layernorm = NormOfAllHeads(config, groups, f"{name}.k_layernorm", ctx)  # type: ignore[assignment]


class NormsBehindBlock(Block):
    """A block that has norms behind its halves, and none before."""

    def __init__(
        self, config: ModelConfig, name: str, ctx: ParallelContext, **halves: Any
    ):
        """halves: attention and feed_forward, of `Block`."""
        super().__init__(replace(config, norm_after_sublayer=True), name, ctx, **halves)
        del self.input_layernorm
        self.pre_mlp_layernorm = None
        self.run = behind


def behind(block: Block, x: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Run the halves of a block one by one, without a norm of their inputs."""
    x = block.attention_dropout.add(block.attend(x, batch), x, batch)
    return block.mlp_dropout.add(block.feed(x, batch), x, batch)


class NormsBehind(Mixer):
    """Attention of blocks with one or both of these norms."""

    kind = "norms_behind_"
    fields = ("norms_behind_attention", "qk_layernorm_of_all_heads")

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
        is_wide = config.qk_layernorm_of_all_heads
        kind = WidelyNormedAttention if is_wide else SelfAttention
        core = make_core(
            config, f"{name}.core_attention", ctx, pattern=pattern, comm_type=comm_type
        )
        return kind(config, name, ctx, output_std=output_std, rotary=rotary, core=core)

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
        """Build the block."""
        std = output_std(config)
        kind = NormsBehindBlock if config.norms_behind_attention else Block
        made = self.make(
            config, f"{name}.self_attention", ctx, output_std=std, **attention
        )
        feed = make_feed_forward(config, experts, f"{name}.mlp", ctx, std)
        return kind(config, name, ctx, attention=made, feed_forward=feed)
