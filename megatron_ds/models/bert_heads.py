"""What follows the last norm of a BERT: the vocabulary for masked tokens, and the order of the two segments.

    x [s(/t), b, h] ── dense, activation, norm ── logits [s, b, Vp/t]         masked tokens (Devlin et al. 2019, task 1)
                    └─ first position ── dense, tanh ── 2 numbers a sample    order of the segments (Lan et al. 2020, SOP)

Both read the same hidden states, so they are one layer of the model, on its last stage. Names are Megatron's.
"""

from typing import NamedTuple

import torch
from torch import nn

from ..data.batch import Batch
from ..mpu.param_spec import Init, ParamSpec
from ..mpu.regions import first_of_sequence
from ..ops.activation import ACTIVATIONS
from ..ops.parameter import new_parameter
from ..tensor_parallel.linear import column_linear
from ..tensor_parallel.replicated import ReplicatedLinear
from .block import make_norm
from .heads import vocabulary_weight
from .layer import LayerFlops, Placement

ORDERS = 2         # as they stand in the text, or swapped


class BertOutput(NamedTuple):
    """logits [s, b, Vp/t], the rank's slice of the padded vocabulary; order [b, 2], the same on every rank, or None."""

    logits: torch.Tensor
    order: torch.Tensor | None


class BertHeads(nn.Module):
    """The head over the vocabulary, and the binary head where the model has one. tied, weight: of `LanguageModelHead`."""

    def __init__(self, config, placement: Placement, *, tied: str | None = None, weight: nn.Parameter | None = None):
        super().__init__()
        self.lm_head = MaskedTokenHead(config, placement)
        self.weight = weight if weight is not None else vocabulary_weight(config, placement, tied)
        spec = ParamSpec("output_layer.bias", (config.vocab_size,), Init("zeros"), split_dim=0,
                         padded=config.padded_vocab_size(placement.tp.size), decay=False)
        self.bias = new_parameter(spec, size=placement.tp.size, dtype=placement.dtype, device=placement.device)
        self.binary_head = SegmentOrderHead(config, placement) if config.bert_binary_head else None
        self.placement = placement

    def forward(self, x: torch.Tensor, batch: Batch, cache=None) -> BertOutput:
        order = None if self.binary_head is None else self.binary_head(x)
        logits = column_linear(self.lm_head(x), self.weight, self.bias, self.placement.tp, self.placement.sequence_parallel)
        return BertOutput(logits, order)


def bert_head_flops(config, seq_length: int, vocab_size: int) -> LayerFlops:
    """The dense layer and the vocabulary at every position; the binary head at the first."""
    h = config.hidden_size
    order = 6.0 * h * (h + ORDERS) if config.bert_binary_head else 0.0
    return LayerFlops(6.0 * seq_length * h * (h + vocab_size) + order)


class MaskedTokenHead(nn.Module):
    """x [s(/t), b, h] → the same shape, ready for the vocabulary."""

    def __init__(self, config, placement: Placement):
        super().__init__()
        gated = ACTIVATIONS[config.activation].parts > 1
        self.activation = ACTIVATIONS["gelu" if gated else config.activation]
        self.dense = ReplicatedLinear(config.hidden_size, config.hidden_size, name="lm_head.dense",
                                      init_std=config.init_method_std, partial_grad=placement.sequence_parallel,
                                      dtype=placement.dtype, device=placement.device)
        self.layer_norm = make_norm(config, "lm_head.layer_norm", placement)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer_norm(self.activation(self.dense(x)))


class SegmentOrderHead(nn.Module):
    """x [s(/t), b, h] → [b, 2], from the first position, where [CLS] stands. Every rank computes the same."""

    def __init__(self, config, placement: Placement):
        super().__init__()
        to = dict(init_std=config.init_method_std, dtype=placement.dtype, device=placement.device)
        self.group = placement.tp if placement.sequence_parallel else None
        self.pooler = ReplicatedLinear(config.hidden_size, config.hidden_size, name="pooler.dense", **to)
        self.binary = ReplicatedLinear(config.hidden_size, ORDERS, name="binary_head", **to)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x[0] if self.group is None else first_of_sequence(x, self.group)         # [b, h]
        return self.binary(torch.tanh(self.pooler(first)))
