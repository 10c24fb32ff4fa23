"""The layers after the last block: the final norm, and the head over the vocabulary.

    x [s(/t), b, h] ── logits [s, b, Vp/t]

Names are Megatron's.
"""

import torch
from torch import nn

from ..batch.batch import Batch
from ..config.options.model import ModelConfig
from ..mpu.collectives import all_gather
from ..mpu.context import ParallelContext
from ..mpu.param_spec import Init, ParamSpec, Split
from ..ops.soft_cap import cap_, capped
from ..tensor_parallel.linear import column_linear, new_shard
from ..tensor_parallel.logits_in_chunks import LogitsInChunks, suitable_chunks
from .embedding import (
    WORD_EMBEDDINGS,
    padded_rows,
    rounded,
    scaled,
    vocabulary_size,
    word_spec,
)
from .layer import LayerFlops
from .normalization import make_norm

HeadLogits = torch.Tensor | LogitsInChunks


class FinalNorm(nn.Module):
    """The norm after the last block, [s(/t), b, h] → the same shape."""

    def __init__(self, config: ModelConfig, ctx: ParallelContext, name: str):
        super().__init__()
        self.norm = make_norm(config, name, ctx)

    def forward(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """`batch` is not used."""
        return self.norm(x)


class LanguageModelHead(nn.Module):
    """x [s(/t), b, h] → logits [s, b, Vp/t], the rank's slice of the padded vocabulary.

    tied    key of the embedding that this weight must equal; None for a weight of its own
    weight  that embedding's parameter when it is on the same rank; otherwise the head makes a copy
            (`spec.tied_copy`)
    """

    def __init__(
        self,
        config: ModelConfig,
        ctx: ParallelContext,
        *,
        tied: str | None = None,
        weight: nn.Parameter | None = None,
    ):
        super().__init__()
        self.ctx = ctx
        self.weight = (
            weight if weight is not None else vocabulary_weight(config, ctx, tied)
        )
        self.bias = vocabulary_bias(config, ctx) if config.output_layer_bias else None
        self.cap = config.final_logit_softcapping
        self.multiplier = rounded(config.logit_multiplier, ctx.dtype)

    def forward(self, x: torch.Tensor, batch: Batch) -> HeadLogits:
        """x [s(/t), b, h] → logits [s, b, Vp/t]; in generation of the r wanted positions, [r, b, Vp/t]. With
        sequence parallelism a collective, which gathers x."""
        x = scaled(x, self.multiplier)
        if batch.past is None:
            return head_logits(x, self.weight, self.bias, self.ctx, self.cap)
        if self.ctx.sequence_parallel:
            x = all_gather(x, self.ctx.tp)
        x = x.index_select(0, batch.past.wanted)
        logits = column_linear(x, self.weight, self.bias, self.ctx.tp, False)
        return logits if self.cap is None else cap_(logits, self.cap)


def head_logits(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    ctx: ParallelContext,
    cap: float | None = None,
) -> HeadLogits:
    """x [s(/t), b, h], weight [Vp/t, h] → logits [s, b, Vp/t]; with `ctx.logit_chunks` their factors, which
    the loss multiplies.

    cap: bound of the logits, cap tanh(logits / cap)
    """
    rows = x.shape[0] * x.shape[1] * (ctx.tp.size if ctx.sequence_parallel else 1)
    chunks = ctx.logit_chunks or suitable_chunks(rows, *reversed(weight.shape))
    if chunks > 1:
        return LogitsInChunks(
            x, weight, bias, ctx.tp, ctx.sequence_parallel, chunks, cap
        )
    logits = column_linear(x, weight, bias, ctx.tp, ctx.sequence_parallel)
    return logits if cap is None else capped(logits, cap)


def head_flops(config: ModelConfig, seq_length: int, vocab_size: int) -> LayerFlops:
    """Return the product with the vocabulary."""
    return LayerFlops(6.0 * seq_length * config.hidden_size * vocab_size)


def vocabulary_weight(
    config: ModelConfig, ctx: ParallelContext, tied: str | None
) -> nn.Parameter:
    """[Vp/t, h] of a head; if tied, a copy of the embedding's weight."""
    return new_shard(
        word_spec(
            config,
            ctx,
            "output_layer" if tied is None else WORD_EMBEDDINGS,
            tied,
            tied_copy=tied is not None,
        ),
        ctx,
    )


def vocabulary_bias(config: ModelConfig, ctx: ParallelContext) -> nn.Parameter:
    """[Vp/t] of a head."""
    spec = ParamSpec(
        "output_layer.bias",
        (vocabulary_size(config),),
        Init("zeros"),
        (Split("tp", 0, padded=padded_rows(config, ctx)),),
        decay=False,
    )
    return new_shard(spec, ctx)
