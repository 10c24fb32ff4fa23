"""Self-attention over heads shared by the tensor-parallel ranks.

Letters: s positions, b samples, n heads, g groups of query heads that share one key and value (g = n: plain multi-head,
g = 1: multi-query; Ainslie et al. 2023, arXiv:2305.13245), d sizes of a head, t tensor-parallel ranks.

The projection is packed by group, so that a contiguous slice of its rows is a set of whole groups:

    rows of linear_qkv   | q_1 .. q_{n/g}  k  v | q .. q  k  v | ...        each letter d rows
                         |------ group 0 -------|-- group 1 ---|
"""

import torch
from torch import nn

from ..data.batch import Batch
from ..ops.attention import attention
from ..ops.dropout import attention_keep_mask
from ..tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from .layer import Placement, check_divides
from .recompute import recompute
from .rotary import Rotary


class SelfAttention(nn.Module):
    """x [s(/t), b, h] → [s(/t), b, h], causal. Each rank holds n/t heads and g/t groups."""

    def __init__(self, config, name: str, placement: Placement, *, rotary: Rotary | None, output_std: float):
        super().__init__()
        n, g, d = config.num_attention_heads, config.query_groups, config.head_dim
        self.placement, self.site, self.head_dim = placement, f"{name}.core_attention", d
        self.num_heads = check_divides("num_attention_heads", n, placement.tp, "each rank holds whole heads")
        self.num_groups = check_divides("num_query_groups", g, placement.tp, "each rank holds whole groups of heads")
        self.dropout = config.attention_dropout
        self.rotary = rotary
        self.recompute_core = False
        to = dict(group=placement.tp, bias=config.add_bias_linear, sequence_parallel=placement.sequence_parallel,
                  dtype=placement.dtype, device=placement.device)
        self.linear_qkv = ColumnParallelLinear(config.hidden_size, (n + 2 * g) * d, name=f"{name}.linear_qkv",
                                               init_std=config.init_method_std, **to)
        self.linear_proj = RowParallelLinear(n * d, config.hidden_size, name=f"{name}.linear_proj", init_std=output_std, **to)

    def forward(self, x: torch.Tensor, batch: Batch, cache=None) -> torch.Tensor:
        q, k, v = self.project(x)
        if self.rotary is not None:
            q, k = self.rotary(q, k, batch.position_ids, once=batch.places is not None)
        if cache is not None:
            k, v = cache.append(k, v)                                           # [all positions so far, b, g/t, d]
        core = recompute if self.recompute_core else _call
        return self.linear_proj(core(self.core_attention, q, k, v, batch))

    def project(self, x):
        """q [s, b, n/t, d], k and v [s, b, g/t, d]."""
        qkv = self.linear_qkv(x)                                                # [s, b, (n + 2g)/t * d]
        queries = self.num_heads // self.num_groups
        qkv = qkv.view(*qkv.shape[:2], self.num_groups, queries + 2, self.head_dim)
        q, k, v = qkv.split((queries, 1, 1), dim=3)       # one split: its backward is one concatenation
        return q.flatten(2, 3), k.squeeze(3), v.squeeze(3)

    def core_attention(self, q, k, v, batch: Batch) -> torch.Tensor:
        """softmax(q kᵀ / √d) v, [s, b, n/t * d]; fewer queries than keys are the last ones."""
        p = self.dropout if batch.training else 0.0
        return attention(q, k, v, mask=batch.attention_mask, documents=batch.documents, dropout=p,
                         keep=self.keep_mask(q, k, p, batch) if p else None)

    def keep_mask(self, q, k, p: float, batch: Batch) -> torch.Tensor:
        """Which probabilities survive: keyed by the global number of the head, so a head keeps its mask on any rank."""
        first = self.placement.tp.rank * self.num_heads
        rows, cols, places = range(q.shape[0]), k.shape[0], batch.places
        if places is not None:
            rows, cols = range(places.length), places.length
        return attention_keep_mask(p, seed=self.placement.seed, site=self.site, sample_ids=batch.sample_ids,
                                   heads=range(first, first + self.num_heads), rows=rows, cols=cols,
                                   picked=None if places is None else places.index, device=q.device)


def _call(function, *args):
    return function(*args)
