"""Attention on CPU that works on the keys that queries see, and keeps no probabilities.

For windows, block layouts, and a sink in the softmax. `query_tiles` has the queries that are worked on
at once and their keys; keys that none of them sees cost nothing. Backward keeps the output and the logarithm
of each row's sum, and computes the probabilities again (Dao et al. 2022, arXiv:2205.14135, appendix B.4). All
products are in fp32; 16-bit queries, keys and values are converted for the duration of the call.

With a sink b of a head (Xiao et al. 2023, arXiv:2309.17453, section 3.2; the softmax of gpt-oss), for scores
s, dp = do vᵀ and a row's sum D = do · out:

    l = log(exp(b) + Σ exp(s))    p = exp(s - l)    ds = p (dp - D)    db = -Σ exp(b - l) D  over the rows

The same formulas without b hold without a sink: a sink is a key of the score b whose value is zero.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ..attention_pattern import AttentionPattern
from ..product import has_memory
from ..scoring import PLAIN, Scoring
from .head_views import heads_first, key_view, query_view, rows_first, samples_of
from .query_tiles import QueryTile, tiles_of

SCORES = 1 << 18                 # worked on at once: 1 MiB, two of them in backward


@dataclass(frozen=True)
class Visible:
    """Which keys are seen.

    pattern    by position, or by blocks that are alike for all heads
    documents  as in `attention`
    padding    bool [b, s], True where no query sees a key
    """

    pattern: AttentionPattern
    documents: Any = None
    padding: torch.Tensor | None = None

    def tiles(self, positions: int, is_real: bool) -> tuple[QueryTile, ...]:
        """The tiles of a sequence; without memory one of the largest, of a range of keys."""
        tiles = tiles_of(self.pattern, positions)
        if is_real:
            return tiles
        largest = max(tiles, key=lambda tile: len(tile.rows) * len(tile.keys))
        return (QueryTile(largest.rows, range(len(largest.keys))),)

    def close(self, scores: torch.Tensor, tile: QueryTile, heads: slice, total: int) -> None:
        """-inf in scores [heads, r, rows, keys] where a query does not see a key. total: number of heads"""
        if not has_memory(scores):
            return
        block = self.pattern.layout.block if self.pattern.layout is not None else 1
        for columns in tile.partly_hidden(self.pattern, block):
            hidden = torch.from_numpy(tile.hidden(self.pattern, block, columns))
            scores[..., columns].add_(torch.zeros(hidden.shape).masked_fill_(hidden, -math.inf))
        if self.documents is not None:
            self._close_documents(scores, tile, heads, total)
        if self.padding is not None:
            closed = self.padding[:, _columns(tile)]
            scores.masked_fill_(_of_heads(closed, heads, total)[:, None, None], -math.inf)

    def _close_documents(self, scores: torch.Tensor, tile: QueryTile, heads: slice, total: int) -> None:
        ids, rows = self.documents.ids, slice(tile.rows.start, tile.rows.stop)
        here = samples_of(heads, total, len(ids))
        keys = ids[here][:, _columns(tile)]
        if bool((keys == ids[here, rows.start, None]).all() & (keys == ids[here, rows.stop - 1, None]).all()):
            return
        closed = ids[:, rows, None] != ids[:, None, _columns(tile)]                 # [b, rows, keys]
        scores.masked_fill_(_of_heads(closed, heads, total)[:, None], -math.inf)


def worth_tiling(positions: int, pattern: AttentionPattern) -> bool:
    """Whether queries see at most half of the keys that they would see without window or layout."""
    if pattern.layout is not None:
        return positions % pattern.layout.block == 0
    return 2 * pattern.pairs(positions) < AttentionPattern(pattern.causal).pairs(positions)


def tiled_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: Visible,
                    scoring: Scoring = PLAIN) -> torch.Tensor:
    """q [s, b, n, d], k and v [s, b, g, d] → [s, b, n * d]; any strides.

    A query that sees no key gets zeros. Heads with different layouts are computed one layout at a time.
    """
    scale, sink, layout = scoring.scale_of(q.shape[-1]), scoring.sink, seen.pattern.layout
    if layout is None or layout.is_alike:
        return _TiledAttention.apply(q, k, v, sink, scale, seen)
    outputs = []
    for heads, of_them in layout.groups:
        index = torch.tensor(heads)
        key_heads = index // (q.shape[2] // k.shape[2])
        alike = replace(seen, pattern=replace(seen.pattern, layout=of_them))
        out = _TiledAttention.apply(q[:, :, index], k[:, :, key_heads], v[:, :, key_heads],
                                    None if sink is None else sink[index], scale, alike)
        outputs.append(out.unflatten(2, (len(heads), -1)))
    order = torch.tensor([head for heads, _ in layout.groups for head in heads]).argsort()
    return torch.cat(outputs, dim=2)[:, :, order].flatten(2)


class _TiledAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, sink, scale, seen):
        out = q.new_empty(q.shape[0], q.shape[1], q.shape[2] * q.shape[3])
        result = query_view(out.view(q.shape), k)                                   # [b g, s, r, d]
        heads, s, r, _ = result.shape
        queries, keys, values = _wide(query_view(q, k), key_view(k), key_view(v))
        sums = queries.new_empty(heads, r, s)                                       # logarithms of rows' sums
        sinks = None if sink is None else sink.detach().float().view(-1, r).repeat(q.shape[1], 1)[..., None]
        for some, tile, rows, taken in _parts(seen, heads, s, r, has_memory(q)):
            scores = _scores(queries, keys, scale, some, rows, taken)
            seen.close(scores, tile, some, heads)
            most = scores.amax(-1)                                                  # [heads, r, rows]
            if sinks is not None:
                most = torch.maximum(most, sinks[some])
            most.masked_fill_(most == -math.inf, 0.0)           # rows that see nothing
            p = scores.sub_(most[..., None]).exp_()
            total = p.sum(-1)
            if sinks is not None:
                total += (sinks[some] - most).exp()
            sums[some, :, rows] = most + torch.where(total > 0, total.log(), math.inf)
            share = p.flatten(1, 2).bmm(taken(values, some)).unflatten(1, (r, -1))   # [heads, r, rows, d]
            share /= total.clamp_min(torch.finfo(torch.float32).tiny)[..., None]
            result[some, rows] = share.transpose(1, 2).to(q.dtype)
        ctx.save_for_backward(q, k, v, sink, out, sums)
        ctx.scale, ctx.seen = scale, seen
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        q, k, v, sink, out, sums = ctx.saved_tensors
        dq, seen = torch.empty_like(q, memory_format=torch.contiguous_format), ctx.seen
        dresult, result = (query_view(t.view(q.shape), k) for t in (dout, out))
        heads, s, r, d = result.shape
        of_row = (dresult.float() * result).sum(-1).transpose(1, 2)                 # D [heads, r, s]
        queries, keys, values, dresult = _wide(query_view(q, k), key_view(k), key_view(v), dresult)
        dqueries, dkeys, dvalues = query_view(dq, k), torch.zeros_like(keys), torch.zeros_like(values)
        for some, tile, rows, taken in _parts(seen, heads, s, r, has_memory(q)):
            scores = _scores(queries, keys, ctx.scale, some, rows, taken)
            seen.close(scores, tile, some, heads)
            p = scores.sub_(sums[some, :, rows, None]).exp_().flatten(1, 2)         # [heads, r rows, keys]
            q_tile, do_tile = heads_first(queries[some, rows]), heads_first(dresult[some, rows])
            taken.add(dvalues, some, p.transpose(1, 2).bmm(do_tile))
            ds = do_tile.bmm(taken(values, some).transpose(1, 2))                   # dp
            ds.sub_(of_row[some, :, rows].flatten(1, 2)[..., None]).mul_(p)
            dq_tile = rows_first(ds.bmm(taken(keys, some)), dqueries)
            dqueries[some, rows] = dq_tile.mul_(ctx.scale).to(q.dtype)
            taken.add(dkeys, some, ds.transpose(1, 2).bmm(q_tile))
        dkeys *= ctx.scale
        dsink = None
        if sink is not None:
            b = sink.float().view(-1, r).repeat(q.shape[1], 1)[..., None]           # [b g, r, 1]
            of_head = -((b - sums).exp() * of_row).sum(-1)
            dsink = of_head.view(q.shape[1], -1).sum(0).to(sink.dtype)
        dk, dv = (_as_given(t, like) for t, like in ((dkeys, k), (dvalues, v)))
        return dq, dk, dv, dsink, None, None


class _Taken:
    """The keys of a tile: taken out of [heads, s, d], and added to it."""

    def __init__(self, tile: QueryTile):
        self.part = slice(tile.keys[0], tile.keys[-1] + 1) if tile.blocks is None else None
        if tile.blocks is not None:
            self.blocks, self.count = torch.from_numpy(tile.blocks), len(tile.blocks)
            self.block = len(tile.keys) // self.count

    def __call__(self, t: torch.Tensor, some: slice) -> torch.Tensor:
        if self.part is not None:
            return t[some, self.part]
        return self._blocks(t)[some].index_select(1, self.blocks).view(-1, self.count * self.block,
                                                                       t.shape[2])

    def add(self, t: torch.Tensor, some: slice, more: torch.Tensor) -> None:
        if self.part is not None:
            t[some, self.part] += more
        else:
            self._blocks(t)[some].index_add_(1, self.blocks, more.view(len(more), self.count, -1))

    def _blocks(self, t: torch.Tensor) -> torch.Tensor:
        return t.view(t.shape[0], -1, self.block * t.shape[2])


def _parts(seen: Visible, heads: int, s: int, r: int,
           is_real: bool) -> Iterator[tuple[slice, QueryTile, slice, _Taken]]:
    """(heads, tile, its rows, its keys) for as many heads as are worked on at once."""
    for tile in seen.tiles(s, is_real):
        step = max(1, SCORES // (r * len(tile.rows) * len(tile.keys)))
        rows, taken = slice(tile.rows.start, tile.rows.stop), _Taken(tile)
        for first in range(0, heads, step):
            yield slice(first, min(first + step, heads)), tile, rows, taken


def _scores(queries: torch.Tensor, keys: torch.Tensor, scale: float, some: slice, rows: slice,
            taken: _Taken) -> torch.Tensor:
    """scale * q kᵀ: [heads, r, rows, keys]."""
    q_tile, k_tile = heads_first(queries[some, rows]), taken(keys, some)
    scores = q_tile.new_empty(len(q_tile), q_tile.shape[1], k_tile.shape[1])
    torch.baddbmm(scores, q_tile, k_tile.transpose(1, 2), beta=0, alpha=scale, out=scores)
    return scores.unflatten(1, (queries.shape[2], -1))


def _wide(*views: torch.Tensor) -> list[torch.Tensor]:
    """In fp32, keys of a head next to each other."""
    return [view.float().contiguous() for view in views]


def _as_given(t: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """[b g, s, d] → [s, b, g, d] in the dtype of `like`."""
    return t.transpose(0, 1).unflatten(1, like.shape[1:3]).to(like.dtype)


def _columns(tile: QueryTile) -> slice | torch.Tensor:
    if tile.blocks is None:
        return slice(tile.keys[0], tile.keys[-1] + 1)
    return torch.from_numpy(tile.keys)


def _of_heads(closed: torch.Tensor, heads: slice, total: int) -> torch.Tensor:
    """[b, ..] → [heads, ..], the sample of each of these heads of all."""
    owner = torch.arange(heads.start, heads.stop) * len(closed) // total
    return closed[owner]
