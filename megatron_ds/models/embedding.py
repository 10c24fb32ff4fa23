"""Tokens [b, s] become hidden states [s(/t), b, h]: the one place where the order of the dimensions changes."""

import torch
from torch import nn

from ..data.batch import Batch
from ..errors import ConfigError
from ..mpu.param_spec import Init, ParamSpec
from ..ops.parameter import new_parameter
from ..tensor_parallel.embedding import VocabParallelEmbedding, lookup
from .hidden_dropout import HiddenDropout
from .layer import Placement

WORD_EMBEDDINGS = "embedding.word_embeddings"


class Embedding(nn.Module):
    """Word embedding, plus learned positions and token types where the model has them, then dropout."""

    weights_read_in_backward = False         # a gradient with respect to tokens does not exist

    def __init__(self, config, placement: Placement, *, tied: str | None, token_types: int = 0):
        super().__init__()
        to = dict(dtype=placement.dtype, device=placement.device)
        self.placement = placement
        self.word_embeddings = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, group=placement.tp, name=WORD_EMBEDDINGS, init_std=config.init_method_std,
            padded_vocab=config.padded_vocab_size(placement.tp.size), sequence_parallel=placement.sequence_parallel,
            tied=tied, **to)
        learned = config.position_embedding_type == "learned_absolute"
        self.position_embeddings = PositionEmbedding(config, placement) if learned else None
        self.tokentype_embeddings = TokenTypeEmbedding(config, placement, token_types) if token_types else None
        self.dropout = HiddenDropout(config.hidden_dropout, "embedding", placement)

    @property
    def weight(self) -> nn.Parameter:
        """What a tied head shares."""
        return self.word_embeddings.weight

    def forward(self, x: None, batch: Batch, cache=None) -> torch.Tensor:
        x = self.word_embeddings(batch.tokens)                                  # [s(/t), b, h]
        if self.position_embeddings is not None:
            x = x + self.position_embeddings(batch.position_ids, self.placement.rows(x))
        if self.tokentype_embeddings is not None:
            x = x + self.tokentype_embeddings(batch.token_types, self.placement.rows(x))
        return self.dropout(x, batch)


class PositionEmbedding(nn.Module):
    """A learned vector per position. With sequence parallelism each rank looks up its own slice of the sequence."""

    def __init__(self, config, placement: Placement):
        super().__init__()
        spec = ParamSpec("embedding.position_embeddings.weight", (config.positions, config.hidden_size),
                         Init("normal", config.init_method_std), partial_over=placement.partial_over)
        self.weight = new_parameter(spec, dtype=placement.dtype, device=placement.device)

    def forward(self, position_ids: torch.Tensor, rows: range) -> torch.Tensor:
        """The vectors of `rows` of position_ids [b, s]: [s(/t), b, h], or [s(/t), 1, h] when all samples count alike."""
        length = position_ids.shape[1]
        if length > len(self.weight):        # the ids themselves are not read: that would wait for the device
            raise ConfigError(f"a sequence of {length} tokens does not fit {len(self.weight)} learned positions. "
                              "Use shorter sequences, or train with a larger max_position_embeddings.")
        if position_ids.stride(0) == 0:                   # one row expanded over the batch: look it up once
            position_ids = position_ids[:1]
        return lookup(self.weight, position_ids[:, rows.start:rows.stop].t())


class TokenTypeEmbedding(nn.Module):
    """A learned vector per type of token: which of the segments of a sample it stands in."""

    def __init__(self, config, placement: Placement, count: int):
        super().__init__()
        spec = ParamSpec("embedding.tokentype_embeddings.weight", (count, config.hidden_size),
                         Init("normal", config.init_method_std), partial_over=placement.partial_over)
        self.weight = new_parameter(spec, dtype=placement.dtype, device=placement.device)

    def forward(self, token_types: torch.Tensor, rows: range) -> torch.Tensor:
        """The vectors of `rows` of token_types [b, s]: [s(/t), b, h]."""
        return lookup(self.weight, token_types[:, rows.start:rows.stop].t())
