"""Token embedding split over the vocabulary, and logits from a weight split the same way.

Each rank holds rows [rank * V'/t, (rank + 1) * V'/t) of the padded vocabulary V'. A rank contributes zeros
for tokens that it does not hold, and the sum over the ranks is the embedding (Shoeybi et al. 2019,
arXiv:1909.08053, section 3). Backward adds rows directly to the main gradient; a gradient of the table's
size is never allocated.
"""

from functools import partial

import torch
from torch import nn

from ..mpu import collectives
from ..mpu.context import ParallelContext
from ..mpu.group import DONE, Group
from ..mpu.param_spec import Init, ParamSpec, Split
from .linear import column_linear, new_shard, start_all_gather
from .weight_grad import Finish, embedding_gradient, now_or_later


class VocabParallelEmbedding(nn.Module):
    """tokens [b, s] → [s, b, h]; with sequence parallelism [s/t, b, h]."""

    def __init__(self, spec: ParamSpec, ctx: ParallelContext):
        """spec: the weight's, made by `vocabulary_spec`."""
        super().__init__()
        self.group = ctx.tp
        self.sequence_parallel = ctx.sequence_parallel
        self.weight = new_shard(spec, ctx)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Collective: all-reduce. With sequence parallelism reduce-scatter, and all-gather in backward."""
        return parallel_lookup(tokens, self.weight, self.group, self.sequence_parallel)


def parallel_lookup(
    tokens: torch.Tensor, weight: torch.Tensor, group: Group, sequence_parallel: bool
) -> torch.Tensor:
    """tokens [b, s], weight [V'/t, h] → [s, b, h]; with sequence parallelism [s/t, b, h]. Collective."""
    return _Embedding.apply(tokens, weight, group, sequence_parallel)


def vocabulary_spec(
    name: str,
    vocab_size: int,
    hidden: int,
    init_std: float,
    padded_vocab: int | None = None,
    tied: str | None = None,
    tied_copy: bool = False,
) -> ParamSpec:
    """Spec of a [vocabulary, hidden] weight of an embedding or an output layer, split over the vocabulary.

    padded_vocab  rows on all ranks together, if more than the vocabulary
    """
    rows = Split("tp", 0, padded=padded_vocab)
    return ParamSpec(
        name,
        (vocab_size, hidden),
        Init("normal", init_std),
        (rows,),
        tied=tied,
        tied_copy=tied_copy,
        is_vocabulary=True,
    )


def parallel_logits(
    x: torch.Tensor, weight: torch.Tensor, group: Group, sequence_parallel: bool = False
) -> torch.Tensor:
    """x [s(/t), b, h], weight [V'/t, h] → logits [s, b, V'/t], 0 in columns of padding."""
    return column_linear(x, weight, None, group, sequence_parallel)


def lookup(weight: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """weight[rows], [*rows.shape, h], of a table that every rank holds whole."""
    return _Rows.apply(weight, rows)


class _Embedding(torch.autograd.Function):
    # See the note at linear._ColumnLinear about the weight on ctx.

    @staticmethod
    def forward(ctx, tokens, weight, group, sequence_parallel):
        rows = tokens.t().reshape(-1)  # [s b]
        elsewhere = None
        if group.size > 1:
            rows = rows - group.rank * weight.shape[0]
            elsewhere = (rows < 0) | (rows >= weight.shape[0])
            rows = rows.masked_fill_(elsewhere, 0)
        ctx.save_for_backward(rows, elsewhere)
        ctx.weight = weight
        ctx.group = group
        ctx.sequence_parallel = sequence_parallel
        out = weight.index_select(0, rows)
        if elsewhere is not None:
            out.masked_fill_(elsewhere.unsqueeze(1), 0)
        out = torch.ops.aten._unsafe_view(
            out, (tokens.shape[1], tokens.shape[0], -1)
        )  # [s, b, h]
        if sequence_parallel:
            return collectives.reduce_scatter(out, group)  # [s/t, b, h]
        collectives.all_reduce_(out, group)
        return out

    @staticmethod
    def backward(ctx, dy):
        group = ctx.group if ctx.sequence_parallel else None
        begin = partial(
            _begin_dw, ctx.weight, *ctx.saved_tensors, dy.contiguous(), group
        )
        return None, now_or_later(ctx.weight, begin)(), None, None


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, rows):
        ctx.save_for_backward(rows)
        ctx.weight = weight
        out = weight.index_select(0, rows.reshape(-1))
        return torch.ops.aten._unsafe_view(out, (*rows.shape, -1))

    @staticmethod
    def backward(ctx, dy):
        (rows,) = ctx.saved_tensors
        return now_or_later(
            ctx.weight, partial(_begin_dw, ctx.weight, rows.reshape(-1), None, dy)
        )(), None


def _begin_dw(
    weight: torch.Tensor,
    rows: torch.Tensor,
    elsewhere: torch.Tensor | None,
    dy: torch.Tensor,
    group: Group | None = None,
) -> Finish:
    """dy [.., h], to be gathered over the group, if any. elsewhere: rows that other ranks hold."""
    dy, gathered = (dy, DONE) if group is None else start_all_gather(dy, group)

    def finish():
        gathered.wait()
        flat = dy.reshape(-1, dy.shape[-1])
        return embedding_gradient(
            weight,
            rows,
            flat if elsewhere is None else flat.masked_fill(elsewhere.unsqueeze(1), 0),
        )

    return finish
