"""`PredictingHead`: the head of a GPT, and depths behind it whose losses go to the ledger of the batch."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from ...batch.batch import Batch
from ...config.options.model import ModelConfig
from ...models.architecture import token_losses
from ...models.embedding import WORD_EMBEDDINGS, vocabulary_size, word_spec
from ...models.heads import HeadLogits, LanguageModelHead
from ...models.layer import Layer
from ...mpu.context import ParallelContext
from ...tensor_parallel.linear import new_shard
from .later_tokens import LaterTokens, later_tokens
from .prediction import Prediction


class PredictingHead(nn.Module):
    """x [s(/t), b, h] → logits [s, b, Vp/t] of the next token. In training each depth adds its loss to the ledger.

    blocks  the layers of the depths, whose names they have
    words   weight of the embedding, if it is on this rank; else this layer makes a copy (`spec.tied_copy`)
    """

    def __init__(
        self,
        config: ModelConfig,
        ctx: ParallelContext,
        blocks: Sequence[Layer],
        words: nn.Parameter | None,
    ):
        super().__init__()
        self.ctx = ctx
        self.vocab_size = vocabulary_size(config)
        self.scale = config.mtp_loss_scaling_factor / len(blocks)
        words = _copy_of_words(config, ctx) if words is None else words
        unties = config.untie_embeddings_and_output_weights
        self.head = LanguageModelHead(config, ctx, weight=None if unties else words)
        self.depths = nn.ModuleList(
            Prediction(
                config,
                block.name.rpartition(".")[0],
                ctx,
                block=block,
                words=words,
                head=self.head,
            )
            for block in blocks
        )

    @property
    def weight(self) -> nn.Parameter:
        """The weight of the output layer."""
        return self.head.weight

    def forward(self, x: torch.Tensor, batch: Batch) -> HeadLogits:
        """In evaluation and generation the depths are not computed. Collective over tp, as the head is."""
        if batch.training and batch.past is None:
            self._predict(x, batch)
        return self.head(x, batch)

    def _predict(self, x: torch.Tensor, batch: Batch) -> None:
        """Add the losses of all depths to the ledger."""
        for k, depth in enumerate(self.depths, 1):
            assert isinstance(depth, Prediction)
            later = later_tokens(batch, k)
            x = depth(x, later.tokens, batch)
            target = replace(batch, labels=later.labels)
            losses = token_losses(
                depth.logits(x, batch), target, self.ctx.tp, self.vocab_size
            )
            total = (losses * later.mask.t().to(losses.dtype)).sum()
            self._add(f"mtp {k} loss", total, later, batch)

    def _add(
        self, name: str, total: torch.Tensor, later: LaterTokens, batch: Batch
    ) -> None:
        """Add the loss of a depth: its mean, or with losses per token its share of the main loss's tokens.

        Context-parallel ranks have parts of the sum, and each reports the whole count: parts are reported times the
        number of ranks, with a weight that is divided by it.
        """
        if batch.ledger.tokens is not None:
            # The ledger weighs a mean by the tokens of the main loss. Here each token has its weight, as in
            # Megatron; the value stays what the mean is made of.
            by_token = total * (later.count / batch.counted_tokens.clamp(min=1.0))
            total = by_token + (total - by_token).detach()
        ranks = self.ctx.cp.size
        batch.ledger.add(name, total * ranks, later.count, weight=self.scale / ranks)


def _copy_of_words(config: ModelConfig, ctx: ParallelContext) -> nn.Parameter:
    spec = word_spec(config, ctx, WORD_EMBEDDINGS, WORD_EMBEDDINGS, tied_copy=True)
    return new_shard(spec, ctx)
