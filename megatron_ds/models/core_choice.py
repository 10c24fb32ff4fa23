"""`make_core`: the core attention of a layer, by the ranks that share its tokens."""

from ..config.options.model import ModelConfig
from ..mpu.context import ParallelContext
from ..ops.attention_pattern import CAUSAL, AttentionPattern
from .attention import Core, CoreAttention


def make_core(
    config: ModelConfig,
    name: str,
    ctx: ParallelContext,
    *,
    pattern: AttentionPattern = CAUSAL,
    comm_type: str = "p2p",
) -> Core:
    """Return the core attention of a layer. name: of its dropout site."""
    if ctx.cp.size == 1:
        return CoreAttention(config, name, ctx, pattern=pattern)
    # Loaded by runs with several context-parallel ranks.
    from .context_attention import COMM_TYPES

    return COMM_TYPES[comm_type](config, name, ctx, pattern=pattern)
