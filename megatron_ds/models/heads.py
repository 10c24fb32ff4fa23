"""The layers after the last block: the final norm, and the heads of GPT and BERT.

    GPT      x [s(/t), b, h] ── logits [s, b, Vp/t]

    BERT     x [s(/t), b, h] ── dense, activation, norm ── logits [s, b, Vp/t]      masked tokens
                             └─ first position ── dense, tanh ── [b, 2]             order of the segments

Masked tokens: Devlin et al. 2019, task 1; order of the segments: Lan et al. 2020, "SOP". Both read the same
hidden states, so they are one layer of the model, on its last stage. Names are Megatron's.
"""

from typing import NamedTuple

import torch
from torch import nn

from ..batch.batch import Batch
from ..config.options.model import ModelConfig
from ..mpu.collectives import all_gather
from ..mpu.context import ParallelContext
from ..mpu.param_spec import Init, ParamSpec, Split
from ..mpu.regions import first_of_sequence
from ..ops.activation import ACTIVATIONS
from ..ops.soft_cap import cap_, capped
from ..tensor_parallel.linear import ReplicatedLinear, column_linear, new_shard
from ..tensor_parallel.logits_in_chunks import LogitsInChunks, suitable_chunks
from .embedding import WORD_EMBEDDINGS, padded_rows, vocabulary_size, word_spec
from .layer import LayerFlops
from .normalization import make_norm

HeadLogits = torch.Tensor | LogitsInChunks
ORDERS = 2  # of two segments: as they stand in the text, or swapped


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

    def forward(self, x: torch.Tensor, batch: Batch) -> HeadLogits:
        """x [s(/t), b, h] → logits [s, b, Vp/t]; in generation of the r wanted positions, [r, b, Vp/t]. With
        sequence parallelism a collective, which gathers x."""
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


class BertOutput(NamedTuple):
    """logits [s, b, Vp/t], the rank's slice of the padded vocabulary, or their factors.

    order [b, 2], the same on every rank; None for a model without binary head.
    """

    logits: HeadLogits
    order: torch.Tensor | None


class BertHeads(nn.Module):
    """The head over the vocabulary, and the binary head if the model has one.

    tied, weight: as of `LanguageModelHead`
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
        self.lm_head = MaskedTokenHead(config, ctx)
        self.weight = (
            weight if weight is not None else vocabulary_weight(config, ctx, tied)
        )
        self.bias = vocabulary_bias(config, ctx)
        self.binary_head = (
            SegmentOrderHead(config, ctx) if config.bert_binary_head else None
        )
        self.cap = config.final_logit_softcapping
        self.ctx = ctx

    def forward(self, x: torch.Tensor, batch: Batch) -> BertOutput:
        """x [s(/t), b, h] → logits, and the order of the segments if the model has a binary head."""
        order = None if self.binary_head is None else self.binary_head(x)
        return BertOutput(
            head_logits(self.lm_head(x), self.weight, self.bias, self.ctx, self.cap),
            order,
        )


class MaskedTokenHead(nn.Module):
    """x [s(/t), b, h] → the same shape, ready for the product with the vocabulary."""

    def __init__(self, config: ModelConfig, ctx: ParallelContext):
        super().__init__()
        gated = ACTIVATIONS[config.activation].parts > 1
        self.activation = ACTIVATIONS["gelu" if gated else config.activation]
        self.dense = ReplicatedLinear(
            config.hidden_size,
            config.hidden_size,
            ctx,
            name="lm_head.dense",
            init_std=config.init_method_std,
            partial_over=ctx.partial_over,
        )
        self.layer_norm = make_norm(config, "lm_head.layer_norm", ctx)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Dense, activation, norm."""
        return self.layer_norm(self.activation(self.dense(x)))


class SegmentOrderHead(nn.Module):
    """x [s(/t), b, h] → [b, 2], from the first position, which holds [CLS]. Every rank computes the same."""

    def __init__(self, config: ModelConfig, ctx: ParallelContext):
        super().__init__()
        self.group = ctx.sequence_group
        std = config.init_method_std
        self.pooler = ReplicatedLinear(
            config.hidden_size,
            config.hidden_size,
            ctx,
            name="pooler.dense",
            init_std=std,
        )
        self.binary = ReplicatedLinear(
            config.hidden_size, ORDERS, ctx, name="binary_head", init_std=std
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [s(/t), b, h] → the output for [CLS]. Collective with sequence parallelism: one rank has it."""
        first = (
            x[0] if self.group is None else first_of_sequence(x, self.group)
        )  # [b, h]
        return self.binary(torch.tanh(self.pooler(first)))


def head_flops(config: ModelConfig, seq_length: int, vocab_size: int) -> LayerFlops:
    """The product with the vocabulary."""
    return LayerFlops(6.0 * seq_length * config.hidden_size * vocab_size)


def bert_head_flops(
    config: ModelConfig, seq_length: int, vocab_size: int
) -> LayerFlops:
    """The dense layer and the vocabulary at every position; the binary head at the first."""
    h = config.hidden_size
    order = 6.0 * h * (h + ORDERS) if config.bert_binary_head else 0.0
    return LayerFlops(6.0 * seq_length * h * (h + vocab_size) + order)


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
