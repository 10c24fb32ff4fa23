"""`Prediction`: one depth of multi-token prediction.

    h_k = Block_k(W_k [enorm(E t_{i+k}); hnorm(h_{k-1})])        h_0: the output of the final norm
    logits_k = head(norm_k(h_k))

DeepSeek-V3 (arXiv:2412.19437), section 2.2, equations 21 to 23, with the norm of each depth in its output, which is
also the input of the next one, as in Megatron. Names are Megatron's. Tensor-parallel ranks divide the rows of W_k,
and exchange the channels that they compute.
"""

import torch
from torch import nn

from ...batch.batch import Batch
from ...config.options.model import ModelConfig
from ...models.embedding import rounded, scaled
from ...models.heads import HeadLogits, LanguageModelHead
from ...models.layer import HiddenDropout, Layer
from ...models.normalization import make_norm
from ...mpu.columns import rows_of_columns
from ...mpu.context import ParallelContext
from ...mpu.regions import gather_from_region
from ...tensor_parallel.linear import ColumnParallelLinear
from ...tensor_parallel.vocabulary import parallel_lookup


class Lookup(nn.Module):
    """tokens [b, s] → [s(/t), b, h], by the weight of the embedding.

    A module of its own, so that each use of the weight is registered: a bucket of gradients is reduced when all uses
    have delivered theirs.
    """

    def __init__(
        self, config: ModelConfig, name: str, ctx: ParallelContext, words: nn.Parameter
    ):
        super().__init__()
        self.ctx = ctx
        self.weight = words
        self.multiplier = rounded(config.embedding_multiplier, ctx.dtype)
        self.dropout = HiddenDropout(config.hidden_dropout, name, ctx)

    def forward(self, tokens: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Collective over tp, as the embedding is."""
        ctx = self.ctx
        x = parallel_lookup(tokens, self.weight, ctx.tp, ctx.sequence_parallel)
        return self.dropout(scaled(x, self.multiplier), batch)


class Prediction(nn.Module):
    """A depth: x [s(/t), b, h] of the depth before → the same shape.

    block  the layer that is behind the projection
    words  weight of the embedding
    head   that of the model, whose weight each depth uses
    """

    def __init__(
        self,
        config: ModelConfig,
        name: str,
        ctx: ParallelContext,
        *,
        block: Layer,
        words: nn.Parameter,
        head: LanguageModelHead,
    ):
        super().__init__()
        self.ctx = ctx
        # The order of these attributes is the order of the parameters in ZeRO's buckets.
        self.lookup = Lookup(config, f"{name}.embedding", ctx, words)
        self.enorm = make_norm(config, f"{name}.enorm", ctx)
        self.hnorm = make_norm(config, f"{name}.hnorm", ctx)
        self.eh_proj = ColumnParallelLinear(
            2 * config.hidden_size,
            config.hidden_size,
            ctx,
            name=f"{name}.eh_proj",
            init_std=config.init_method_std,
            bias=False,
        )
        self.transformer_layer = block.make()
        self.final_layernorm = make_norm(config, f"{name}.final_layernorm", ctx)
        self.head = LanguageModelHead(config, ctx, weight=head.weight)
        self.head.bias = head.bias

    def forward(
        self, x: torch.Tensor, tokens: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        """tokens [b, s]: k places later than those of the batch."""
        e = self.enorm(self.lookup(tokens, batch))
        joined = torch.cat((e, self.hnorm(x)), -1)  # [s(/t), b, 2 h]
        x = self._all_channels(self.eh_proj(joined))
        return self.final_layernorm(self.transformer_layer(x, batch))

    def _all_channels(self, x: torch.Tensor) -> torch.Tensor:
        """x [s, b, h/t] of each rank → [s(/t), b, h]. Collective over tp."""
        tp = self.ctx.tp
        if tp.size == 1 or not self.ctx.sequence_parallel:
            return gather_from_region(x, tp)
        samples = x.shape[1]
        rows = rows_of_columns(x.flatten(0, 1), tp)
        return rows.unflatten(0, (-1, samples))

    def logits(self, x: torch.Tensor, batch: Batch) -> HeadLogits:
        """x [s(/t), b, h], of this depth → logits [s, b, Vp/t]."""
        return self.head(x, batch)
