"""Widths of multi-latent attention, and the scale of its scores: functions of the options of a model."""

from ...config.options.model import ModelConfig
from ...ops.rotary_scaling import yarn_growth


def query_width(config: ModelConfig) -> int:
    """Return the channels of a query and a key of a head: those without positions, then the rotated ones."""
    return config.qk_head_dim + config.qk_pos_emb_head_dim


def score_scale(config: ModelConfig) -> float:
    """Return the factor of the products of queries and keys.

    It is 1 / sqrt(width); with YaRN the square of its growth, of weight mscale_all_dim, is a further factor, where
    that of the rotation is divided by the same (DeepSeek-V3, arXiv:2412.19437, section 4.3).
    """
    if config.softmax_scale is not None:
        return config.softmax_scale
    scale = query_width(config) ** -0.5
    if config.position_embedding_type != "yarn":
        return scale
    return scale * yarn_growth(config.yarn_factor, config.yarn_mscale_all_dim) ** 2


def sends_latents(config: ModelConfig, tp: int, cp: int, comm_type: str) -> bool:
    """Return whether context-parallel ranks gather latents, and the rotated part of the keys, in place of the keys and
    values of a rank's heads: where these numbers of a token are fewer."""
    if cp == 1 or comm_type != "all_gather":
        return False
    of_heads = query_width(config) + config.v_head_dim
    heads = config.num_attention_heads // tp
    return config.kv_lora_rank + config.qk_pos_emb_head_dim < heads * of_heads
