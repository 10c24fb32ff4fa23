"""The norms of a model, as its configuration chooses them."""

from ..config.options.model import ModelConfig
from ..mpu.context import ParallelContext
from ..ops.norms import NORMS, LayerNorm, Norm, UnbiasedLayerNorm
from .layer import pick


def make_norm(config: ModelConfig, name: str, ctx: ParallelContext) -> Norm:
    """Return the norm of hidden states. With sequence parallelism its gradient is a sum over the rank's rows."""
    return sized_norm(
        config, config.hidden_size, name, ctx, partial_over=ctx.partial_over
    )


def make_head_norm(config: ModelConfig, name: str, ctx: ParallelContext) -> Norm:
    """Return the norm of each head of queries or keys (Dehghani et al. 2023, arXiv:2302.05442, section 2).

    All heads share its weights. Tensor-parallel ranks hold different heads, so its gradient is always a
    partial sum over them.
    """
    return sized_norm(
        config,
        config.head_dim,
        name,
        ctx,
        partial_over=("tp",),
        decay=config.apply_wd_to_qk_layernorm,
    )


def sized_norm(
    config: ModelConfig,
    size: int,
    name: str,
    ctx: ParallelContext,
    *,
    partial_over: tuple[str, ...],
    decay: bool = False,
) -> Norm:
    """Return a norm of so many channels. partial_over, decay: of its weights, as in `ParamSpec`"""
    kind: type[Norm] = pick(NORMS, "normalization", config.normalization)
    if kind is LayerNorm and not config.use_bias_in_norms:
        kind = UnbiasedLayerNorm
    return kind(
        size,
        name=name,
        eps=config.norm_epsilon,
        dtype=ctx.dtype,
        device=ctx.device,
        zero_centred=config.apply_layernorm_1p,
        partial_over=partial_over,
        decay=decay,
    )
