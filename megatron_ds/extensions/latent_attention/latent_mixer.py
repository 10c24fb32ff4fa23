"""`LatentMixer`: multi-latent attention as the mixer of blocks."""

from collections.abc import Mapping
from dataclasses import replace

from ...config.options.model import ModelConfig
from ...models.attention import Rotary, rotary_scalings
from ...models.core_choice import make_core
from ...models.layer import LayerFlops
from ...models.mixers import Attention, HeadSizes, Mixer
from ...mpu.context import ParallelContext
from ...ops.attention_pattern import AttentionPattern
from .latent_attention import LatentAttention
from .latent_sizes import query_width, score_scale, sends_latents


class LatentMixer(Mixer):
    """Each head has a key and a value of its own, both projected from the latent of the token."""

    kind = "latent_"
    fields = (
        "multi_latent_attention",
        "q_lora_rank",
        "kv_lora_rank",
        "qk_head_dim",
        "qk_pos_emb_head_dim",
        "v_head_dim",
        "latent_norm_epsilon",
    )

    def rotary(self, config: ModelConfig, shared: Rotary | None) -> Rotary | None:
        return Rotary(
            config.qk_pos_emb_head_dim,
            1.0,
            config.rotary_base,
            rotary_scalings(config),
            config.rotary_interleaved,
        )

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
        core = make_core(
            replace(config, softmax_scale=score_scale(config)),
            f"{name}.core_attention",
            ctx,
            pattern=pattern,
            comm_type=comm_type,
        )
        return LatentAttention(
            config,
            name,
            ctx,
            output_std=output_std,
            rotary=rotary,
            core=core,
            sends_latents=sends_latents(config, ctx.tp.size, ctx.cp.size, comm_type),
        )

    def flops(
        self, config: ModelConfig, seq_length: int, pattern: AttentionPattern
    ) -> LayerFlops:
        heads = config.num_attention_heads
        # Elements of the weights, each of which is multiplied once for a token.
        weights = sum(into * out for into, out in self.linear_layers(config).values())
        widths = heads * (query_width(config) + config.v_head_dim)
        scores = 6.0 * pattern.pairs(seq_length) * widths
        return LayerFlops(float(6 * seq_length * weights), scores)

    def linear_layers(self, config: ModelConfig) -> Mapping[str, tuple[int, int]]:
        h = config.hidden_size
        heads = config.num_attention_heads
        queries = heads * query_width(config)
        keys_values = heads * (config.qk_head_dim + config.v_head_dim)
        latent = config.kv_lora_rank
        rank = config.q_lora_rank
        to_queries = {"linear_q_proj": (h, queries)}
        if rank is not None:
            to_queries = {
                "linear_q_down_proj": (h, rank),
                "linear_q_up_proj": (rank, queries),
            }
        return {
            **to_queries,
            "linear_kv_down_proj": (h, latent + config.qk_pos_emb_head_dim),
            "linear_kv_up_proj": (latent, keys_values),
            "linear_proj": (heads * config.v_head_dim, h),
        }

    def head_sizes(self, config: ModelConfig) -> HeadSizes:
        heads = config.num_attention_heads
        return HeadSizes(heads, heads, query_width(config), config.v_head_dim)


LATENT_MIXER = LatentMixer()
