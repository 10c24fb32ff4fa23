"""What comes after the last block: the final norm, and the projection onto the vocabulary."""

import torch
from torch import nn

from ..data.batch import Batch
from ..ops.parameter import new_parameter
from ..tensor_parallel.embedding import parallel_logits, vocabulary_spec
from .block import make_norm
from .embedding import WORD_EMBEDDINGS
from .layer import LayerFlops, Placement


class FinalNorm(nn.Module):
    def __init__(self, config, placement: Placement, name: str):
        super().__init__()
        self.norm = make_norm(config, name, placement)

    def forward(self, x: torch.Tensor, batch: Batch, cache=None) -> torch.Tensor:
        return self.norm(x)


class LanguageModelHead(nn.Module):
    """x [s(/t), b, h] → logits [s, b, Vp/t], the rank's slice of the padded vocabulary.

    tied    key of the embedding that this weight must equal; None for a weight of its own
    weight  that embedding's parameter when it lives on the same stage; otherwise a copy is made, known by its `spec` as one
    """

    def __init__(self, config, placement: Placement, *, tied: str | None = None, weight: nn.Parameter | None = None):
        super().__init__()
        self.placement = placement
        self.weight = weight if weight is not None else vocabulary_weight(config, placement, tied)

    def forward(self, x: torch.Tensor, batch: Batch, cache=None) -> torch.Tensor:
        return parallel_logits(x, self.weight, self.placement.tp, self.placement.sequence_parallel)


def head_flops(config, seq_length: int, vocab_size: int) -> LayerFlops:
    return LayerFlops(6.0 * seq_length * config.hidden_size * vocab_size)


def vocabulary_weight(config, placement: Placement, tied: str | None) -> nn.Parameter:
    """[Vp/t, h] of a head; a tied one is a copy of the embedding's."""
    name = "output_layer" if tied is None else WORD_EMBEDDINGS
    spec = vocabulary_spec(f"{name}.weight", config.vocab_size, config.hidden_size, config.init_method_std,
                           config.padded_vocab_size(placement.tp.size), tied, tied_copy=tied is not None)
    return new_parameter(spec, size=placement.tp.size, dtype=placement.dtype, device=placement.device)
