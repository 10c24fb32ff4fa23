"""Tokens [b, s] become hidden states [s(/t), b, h]. Only here does the order of the dimensions change."""

import math

import torch
from torch import nn

from ..batch.batch import Batch
from ..config.options.model import ModelConfig
from ..errors import ConfigError
from ..mpu.context import ParallelContext
from ..mpu.param_spec import Init, ParamSpec
from ..tensor_parallel.linear import new_shard
from ..tensor_parallel.vocabulary import VocabParallelEmbedding, lookup, vocabulary_spec
from .layer import HiddenDropout
from .normalization import make_norm

WORD_EMBEDDINGS = "embedding.word_embeddings"


class Embedding(nn.Module):
    """Word embedding, times --embedding-multiplier, normalized with --embed-layernorm, plus learned positions and
    token types where the model has them, then dropout.

    tied         key of the weight that a head shares; None if the head has its own weight
    token_types  number of segments of a sample; 0 for models without segments
    """

    def __init__(
        self,
        config: ModelConfig,
        ctx: ParallelContext,
        *,
        tied: str | None,
        token_types: int = 0,
    ):
        super().__init__()
        self.ctx = ctx
        self.word_embeddings = VocabParallelEmbedding(
            word_spec(config, ctx, WORD_EMBEDDINGS, tied), ctx
        )
        # Rounded as a weight is.
        self.multiplier = rounded(config.embedding_multiplier, ctx.dtype)
        learned = config.position_embedding_type == "learned_absolute"
        self.position_embeddings = PositionEmbedding(config, ctx) if learned else None
        self.tokentype_embeddings = (
            TokenTypeEmbedding(config, ctx, token_types) if token_types else None
        )
        self.norm = (
            make_norm(config, "embedding.norm", ctx) if config.embed_layernorm else None
        )
        # A gradient with respect to tokens does not exist; that of the norm's input needs its weight.
        self.weights_read_in_backward = self.norm is not None
        self.dropout = HiddenDropout(config.hidden_dropout, "embedding", ctx)

    @property
    def weight(self) -> nn.Parameter:
        """The weight that a tied head shares."""
        return self.word_embeddings.weight

    def forward(self, none: None, batch: Batch) -> torch.Tensor:
        """Return the tokens of `batch` as hidden states [s(/t), b, h]; the first layer has no input."""
        x: torch.Tensor = self.word_embeddings(batch.tokens)  # [s(/t), b, h]
        x = scaled(x, self.multiplier)
        if self.norm is not None:
            x = self.norm(x)
        rows = self.ctx.slice.rows(batch.seq_length)
        if self.position_embeddings is not None:
            x = x + self.position_embeddings(batch.position_ids, rows)
        if self.tokentype_embeddings is not None:
            x = x + self.tokentype_embeddings(batch.token_types, rows)
        return self.dropout(x, batch)


class PositionEmbedding(nn.Module):
    """A learned vector per position. Each rank looks up the positions of its rows."""

    def __init__(self, config: ModelConfig, ctx: ParallelContext):
        super().__init__()
        spec = ParamSpec(
            "embedding.position_embeddings.weight",
            (config.positions, config.hidden_size),
            Init("normal", config.init_method_std),
            partial_over=ctx.partial_over,
        )
        self.weight = new_shard(spec, ctx)

    def forward(self, position_ids: torch.Tensor, rows: range) -> torch.Tensor:
        """Return the vectors of `rows` of position_ids [b, s]: [s(/t), b, h], or [s(/t), 1, h] if all are alike.

        Raises ConfigError for a sequence that is longer than the table.
        """
        length = position_ids.shape[1]
        if length > len(
            self.weight
        ):  # the ids themselves are not read: that would wait for the device
            raise ConfigError(
                f"a sequence of {length} tokens does not fit {len(self.weight)} learned "
                "positions. Use shorter sequences, or train with a larger "
                "max_position_embeddings."
            )
        if (
            position_ids.stride(0) == 0
        ):  # one row expanded over the batch: look it up once
            position_ids = position_ids[:1]
        return lookup(self.weight, position_ids[:, rows.start : rows.stop].t())


class TokenTypeEmbedding(nn.Module):
    """A learned vector per type of token, its segment of the sample."""

    def __init__(self, config: ModelConfig, ctx: ParallelContext, count: int):
        super().__init__()
        spec = ParamSpec(
            "embedding.tokentype_embeddings.weight",
            (count, config.hidden_size),
            Init("normal", config.init_method_std),
            partial_over=ctx.partial_over,
        )
        self.weight = new_shard(spec, ctx)

    def forward(self, token_types: torch.Tensor, rows: range) -> torch.Tensor:
        """Return the vectors of `rows` of token_types [b, s]: [s(/t), b, h]."""
        return lookup(self.weight, token_types[:, rows.start : rows.stop].t())


def word_spec(
    config: ModelConfig,
    ctx: ParallelContext,
    name: str,
    tied: str | None,
    tied_copy: bool = False,
) -> ParamSpec:
    """Spec of a [vocabulary, h] weight, of an embedding or a head."""
    return vocabulary_spec(
        f"{name}.weight",
        vocabulary_size(config),
        config.hidden_size,
        config.init_method_std,
        padded_rows(config, ctx),
        tied,
        tied_copy,
    )


def vocabulary_size(config: ModelConfig) -> int:
    """Return the number of tokens, which a run knows from its tokenizer before layers are built."""
    assert config.vocab_size is not None, "the vocabulary of a run is known"
    return config.vocab_size


def padded_rows(config: ModelConfig, ctx: ParallelContext) -> int:
    """Rows of the vocabulary over all tensor-parallel ranks."""
    return config.padded_vocab_size(ctx.tp.size)


def scaled(x: torch.Tensor, multiplier: float) -> torch.Tensor:
    """Return x times the multiplier; x itself for 1."""
    return x if multiplier == 1 else x * multiplier


def rounded(value: float, dtype: torch.dtype) -> float:
    """Return the nearest number of the dtype, as weights of published models were multiplied by. It makes no tensor,
    which a plan could not read."""
    mantissa, exponent = math.frexp(value)
    unit = torch.finfo(dtype).eps / 2
    return math.ldexp(round(mantissa / unit) * unit, exponent)
