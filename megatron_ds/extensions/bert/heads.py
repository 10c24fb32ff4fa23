"""The heads of BERT, after its last block.

    x [s(/t), b, h] ── dense, activation, norm ── logits [s, b, Vp/t]      masked tokens
                    └─ first position ── dense, tanh ── [b, 2]             order of the segments

Masked tokens: Devlin et al. 2019, task 1; order of the segments: Lan et al. 2020, "SOP". Both read the same
hidden states, so they are one layer of the model, on its last stage. Names are Megatron's.
"""

from typing import NamedTuple

import torch
from torch import nn

from ...batch.batch import Batch
from ...config.options.model import ModelConfig
from ...models.embedding import rounded, scaled
from ...models.heads import (
    HeadLogits,
    head_logits,
    vocabulary_bias,
    vocabulary_weight,
)
from ...models.layer import LayerFlops
from ...models.normalization import make_norm
from ...mpu.context import ParallelContext
from ...mpu.regions import first_of_sequence
from ...ops.activation import ACTIVATIONS
from ...tensor_parallel.linear import ReplicatedLinear

ORDERS = 2  # of two segments: as they stand in the text, or swapped


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
        self.multiplier = rounded(config.logit_multiplier, ctx.dtype)
        self.ctx = ctx

    def forward(self, x: torch.Tensor, batch: Batch) -> BertOutput:
        """x [s(/t), b, h] → logits, and the order of the segments if the model has a binary head."""
        order = None if self.binary_head is None else self.binary_head(x)
        return BertOutput(
            head_logits(
                scaled(self.lm_head(x), self.multiplier),
                self.weight,
                self.bias,
                self.ctx,
                self.cap,
            ),
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


def bert_head_flops(
    config: ModelConfig, seq_length: int, vocab_size: int
) -> LayerFlops:
    """Return the dense layer and the vocabulary at every position; the binary head at the first."""
    h = config.hidden_size
    order = 6.0 * h * (h + ORDERS) if config.bert_binary_head else 0.0
    return LayerFlops(6.0 * seq_length * h * (h + vocab_size) + order)
