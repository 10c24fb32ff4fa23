"""Token embedding split over the vocabulary, and logits from a weight split the same way.

Each rank holds rows [rank * V'/t, (rank + 1) * V'/t) of the padded vocabulary V'. A rank contributes zeros for tokens that it
does not hold, and the sum over the ranks is the embedding (Shoeybi et al. 2019, arXiv:1909.08053, section 3).
Backward adds rows straight into `main_grad`: the gradient of a table is never built.
"""

import torch
from torch import nn

from ..mpu import collectives
from ..mpu.group import Group
from ..mpu.param_spec import Init, ParamSpec
from ..ops.parameter import new_parameter
from .linear import column_linear
from .weight_grad import embedding_gradient


class VocabParallelEmbedding(nn.Module):
    """tokens [b, s] → [s, b, h]; with sequence parallelism [s/t, b, h]."""

    def __init__(self, vocab_size: int, hidden: int, *, group: Group, name: str, init_std: float,
                 padded_vocab: int | None = None, sequence_parallel: bool = False, tied: str | None = None,
                 tied_copy: bool = False, dtype: torch.dtype = torch.float32, device=None):
        super().__init__()
        self.group, self.sequence_parallel = group, sequence_parallel
        spec = vocabulary_spec(f"{name}.weight", vocab_size, hidden, init_std, padded_vocab, tied, tied_copy)
        self.weight = new_parameter(spec, size=group.size, dtype=dtype, device=device)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return _Embedding.apply(tokens, self.weight, self.group, self.sequence_parallel)


def vocabulary_spec(name: str, vocab_size: int, hidden: int, init_std: float, padded_vocab: int | None = None,
                    tied: str | None = None, tied_copy: bool = False) -> ParamSpec:
    """Passport of a [vocabulary, hidden] weight: the embedding's, or an output layer's that `parallel_logits` is given."""
    return ParamSpec(name, (vocab_size, hidden), Init("normal", init_std), split_dim=0, padded=padded_vocab, tied=tied,
                     tied_copy=tied_copy)


def parallel_logits(x: torch.Tensor, weight: torch.Tensor, group: Group, sequence_parallel: bool = False) -> torch.Tensor:
    """x [s(/t), b, h], weight [V'/t, h] → logits [s, b, V'/t]. Columns of padding come out as 0; the loss ignores them."""
    return column_linear(x, weight, None, group, sequence_parallel)


class _Embedding(torch.autograd.Function):
    # The weight is on ctx for the reason told at linear._ColumnLinear.

    @staticmethod
    def forward(ctx, tokens, weight, group, sequence_parallel):
        rows = tokens.t().reshape(-1)                                            # [s b]
        elsewhere = None
        if group.size > 1:
            rows = rows - group.rank * weight.shape[0]
            elsewhere = (rows < 0) | (rows >= weight.shape[0])
            rows = rows.masked_fill_(elsewhere, 0)
        ctx.save_for_backward(rows, elsewhere)
        ctx.weight, ctx.group, ctx.sequence_parallel = weight, group, sequence_parallel
        out = weight.index_select(0, rows)
        if elsewhere is not None:
            out.masked_fill_(elsewhere.unsqueeze(1), 0)
        out = torch.ops.aten._unsafe_view(out, (tokens.shape[1], tokens.shape[0], -1))          # [s, b, h]
        if sequence_parallel:
            return collectives.reduce_scatter(out, group)                        # [s/t, b, h]
        collectives.all_reduce_(out, group)
        return out

    @staticmethod
    def backward(ctx, dy):
        rows, elsewhere = ctx.saved_tensors
        if ctx.sequence_parallel:
            dy = collectives.all_gather(dy, ctx.group)
        dy = dy.reshape(-1, dy.shape[-1])
        if elsewhere is not None:
            dy = dy.masked_fill(elsewhere.unsqueeze(1), 0)
        return None, embedding_gradient(ctx.weight, rows, dy), None, None
