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
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from ..attention_pattern import AttentionPattern
from ..meta_tensors import has_memory
from ..scoring import PLAIN, Scoring
from .head_views import heads_first, key_view, query_view, rows_first
from .query_tiles import BlockTiles, RangeTile, block_tiles, range_tiles

SCORES = 1 << 18  # of a tile, worked on at once: 1 MiB, two of them in backward
STACKED = 1 << 19  # of stacked tiles


@dataclass(frozen=True)
class Visible:
    """Which keys are seen, and how far.

    pattern    by position, or by blocks that are alike for all heads
    documents  as in `attention`
    padding    bool [b, s], True where no query sees a key
    slopes     fp32 [n], of ALiBi, by which the scores fall with the distance, for a part of the heads [h, r];
               None: they do not fall
    """

    pattern: AttentionPattern
    documents: Any = None
    padding: torch.Tensor | None = None
    slopes: torch.Tensor | None = None

    def close(
        self,
        scores: torch.Tensor,
        rows: torch.Tensor,
        keys: torch.Tensor,
        owner: torch.Tensor,
    ) -> None:
        """-inf in scores [heads, .., r, R, K] where documents or padding hide a key, after ALiBi; in place.

        rows: int64 [.., R] and keys: int64 [.., K], positions; owner: the sample of each head
        """
        if self.slopes is not None:
            slopes = self.slopes.view(
                len(self.slopes), *[1] * (scores.dim() - 4), -1, 1, 1
            )
            distance = (
                (rows[..., None] - keys[..., None, :]).abs().float()
            )  # [.., R, K]
            scores.addcmul_(slopes, distance.unsqueeze(-3), value=-1)
        if self.documents is not None:
            ids = self.documents.ids
            closed = (
                ids[:, rows][..., None] != ids[:, keys][..., None, :]
            )  # [b, .., R, K]
            if closed.any():
                scores.masked_fill_(closed[owner].unsqueeze(-3), -math.inf)
        if self.padding is not None:
            scores.masked_fill_(
                self.padding[:, keys][owner][..., None, None, :], -math.inf
            )


def worth_tiling(positions: int, pattern: AttentionPattern) -> bool:
    """Whether queries see at most half of the keys that they would see without window or layout."""
    if pattern.layout is not None:
        has_window = (
            pattern.left is not None or not pattern.causal and pattern.right is not None
        )
        return positions % pattern.layout.block == 0 and not has_window
    return 2 * pattern.pairs(positions) < AttentionPattern(pattern.causal).pairs(
        positions
    )


def tiled_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: Visible,
    scoring: Scoring = PLAIN,
) -> torch.Tensor:
    """q [s, b, n, d], k and v [s, b, g, d] → [s, b, n * d]; any strides.

    A query that sees no key gets zeros. Heads with different layouts are computed one layout at a time.
    """
    scale = scoring.scale_of(q.shape[-1])
    sink = scoring.sink
    layout = seen.pattern.layout
    # One layout, or none, is computed for all heads at once.
    slopes = None if scoring.alibi is None else scoring.alibi.slopes
    seen = replace(seen, slopes=slopes)
    if layout is None or layout.is_alike:
        return _TiledAttention.apply(q, k, v, sink, scale, seen)
    # Heads that share a layout are computed together.
    outputs = []
    for heads, of_them in layout.groups:
        index = torch.tensor(heads)
        key_heads = index // (q.shape[2] // k.shape[2])
        alike = replace(
            seen,
            pattern=replace(seen.pattern, layout=of_them),
            slopes=None if slopes is None else slopes[index],
        )
        out = _TiledAttention.apply(
            q[:, :, index],
            k[:, :, key_heads],
            v[:, :, key_heads],
            None if sink is None else sink[index],
            scale,
            alike,
        )
        outputs.append(out.unflatten(2, (len(heads), -1)))
    # The heads in their own order again.
    order = torch.tensor(
        [head for heads, _ in layout.groups for head in heads]
    ).argsort()
    return torch.cat(outputs, dim=2)[:, :, order].flatten(2)


class _TiledAttention(torch.autograd.Function):
    # Tensors of rows are [b g, s, r, ..], of keys [b g, s, d]; those of a part [heads, r rows, ..] and
    # [heads, keys, d].

    @staticmethod
    def forward(ctx, q, k, v, sink, scale, seen):
        out = q.new_empty(q.shape[0], q.shape[1], q.shape[2] * q.shape[3])
        queries, keys, values = _wide(query_view(q, k), key_view(k), key_view(v))
        result = torch.empty_like(queries)
        sums = queries.new_empty(*queries.shape[:3], 1)
        sinks = None if sink is None else _of_rows(sink, sums)
        for part in _parts(seen, queries, q.shape[1]):
            scores = part.scores(part.rows_of(queries), part.keys_of(keys), scale)
            most = scores.amax(-1, keepdim=True)
            if sinks is not None:
                most = torch.maximum(most, part.rows_of(sinks))
            most.masked_fill_(most == -math.inf, 0.0)  # rows that see nothing
            p = scores.sub_(most).exp_()
            total = p.sum(-1, keepdim=True)
            if sinks is not None:
                total += (part.rows_of(sinks) - most).exp()
            part.put_rows(sums, most + torch.where(total > 0, total.log(), math.inf))
            share = p.bmm(part.keys_of(values))
            part.put_rows(
                result, share.div_(total.clamp_min(torch.finfo(torch.float32).tiny))
            )
        query_view(out.view(q.shape), k).copy_(result)
        ctx.save_for_backward(q, k, v, sink, out, sums)
        ctx.scale = scale
        ctx.seen = seen
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        q, k, v, sink, out, sums = ctx.saved_tensors
        dresult, result = (query_view(t.view(q.shape), k) for t in (dout, out))
        # The dot product of output and gradient is the sum of p dp over keys.
        of_row = (dresult.float() * result).sum(-1, keepdim=True)  # D [heads, s, r, 1]
        queries, keys, values, dresult = _wide(
            query_view(q, k), key_view(k), key_view(v), dresult
        )
        # Probabilities of each tile are computed again from the sums of forward.
        dqueries = torch.empty_like(queries)
        dkeys = torch.zeros_like(keys)
        dvalues = torch.zeros_like(values)
        for part in _parts(ctx.seen, queries, q.shape[1]):
            q_tile = part.rows_of(queries)
            k_tile = part.keys_of(keys)
            do_tile = part.rows_of(dresult)
            p = part.scores(q_tile, k_tile, ctx.scale).sub_(part.rows_of(sums)).exp_()
            part.add_keys(dvalues, p.transpose(1, 2).bmm(do_tile))
            ds = do_tile.bmm(part.keys_of(values).transpose(1, 2))  # dp
            ds.sub_(part.rows_of(of_row)).mul_(p)
            part.put_rows(dqueries, _products(ds, k_tile, ctx.scale))
            part.add_keys(dkeys, _products(ds.transpose(1, 2), q_tile, ctx.scale))
        # Gradients in the dtypes and shapes of the arguments.
        dq = torch.empty_like(q, memory_format=torch.contiguous_format)
        query_view(dq, k).copy_(dqueries)
        dsink = None
        if sink is not None:
            of_head = -((_of_rows(sink, sums) - sums).exp() * of_row).sum(
                1
            )  # [b g, r, 1]
            dsink = of_head.view(q.shape[1], -1).sum(0).to(sink.dtype)
        dk, dv = (_as_given(t, like) for t, like in ((dkeys, k), (dvalues, v)))
        return dq, dk, dv, dsink, None, None


class _RangePart:
    """A tile of consecutive positions, for some heads."""

    def __init__(
        self, tile: RangeTile, seen: Visible, some: slice, owner: torch.Tensor
    ):
        self.tile = tile
        self.seen = seen
        self.some = some
        self.owner = owner
        self.rows = slice(tile.rows.start, tile.rows.stop)
        self.keys = slice(tile.keys.start, tile.keys.stop)

    def rows_of(self, t: torch.Tensor) -> torch.Tensor:
        return heads_first(t[self.some, self.rows])

    def put_rows(self, t: torch.Tensor, tile: torch.Tensor) -> None:
        t[self.some, self.rows] = rows_first(tile, t)

    def keys_of(self, t: torch.Tensor) -> torch.Tensor:
        return t[self.some, self.keys]

    def add_keys(self, t: torch.Tensor, more: torch.Tensor) -> None:
        t[self.some, self.keys] += more

    def scores(
        self, q_tile: torch.Tensor, k_tile: torch.Tensor, scale: float
    ) -> torch.Tensor:
        scores = _products(q_tile, k_tile.transpose(1, 2), scale)
        if has_memory(scores):
            views = scores.unflatten(1, (-1, len(self.tile.rows)))  # [heads, r, R, K]
            for edge in self.tile.edges:
                part = views[..., edge.columns]
                bias = _edge_bias(
                    self.seen.pattern, len(self.tile.rows), edge.offset, part.shape[-1]
                )
                part += torch.from_numpy(bias)
            rows, keys = (
                torch.arange(span.start, span.stop)
                for span in (self.tile.rows, self.tile.keys)
            )
            self.seen.close(views, rows, keys, self.owner)
        return scores


class _BlockPart:
    """Stacked tiles of blocks, for some heads: what they hold is gathered."""

    def __init__(
        self, tiles: BlockTiles, seen: Visible, some: slice, owner: torch.Tensor
    ):
        self.tiles = tiles
        self.seen = seen
        self.some = some
        self.owner = owner
        self.rows, self.keys = (
            torch.from_numpy(t.reshape(-1)) for t in (tiles.rows, tiles.keys)
        )

    def rows_of(self, t: torch.Tensor) -> torch.Tensor:
        taken = self._blocks(t).index_select(1, self.rows)
        return heads_first(
            taken.view(-1, self.tiles.rows.shape[1] * self.tiles.block, *t.shape[2:])
        )

    def put_rows(self, t: torch.Tensor, tile: torch.Tensor) -> None:
        rows = rows_first(tile, t).reshape(
            -1, len(self.rows), self.tiles.block * t[0, 0].numel()
        )
        self._blocks(t).index_copy_(
            1, self.rows, rows.view(self._blocks(t).shape[0], *rows.shape[1:])
        )

    def keys_of(self, t: torch.Tensor) -> torch.Tensor:
        taken = self._blocks(t).index_select(1, self.keys)
        return taken.view(-1, self.tiles.keys.shape[1] * self.tiles.block, t.shape[2])

    def add_keys(self, t: torch.Tensor, more: torch.Tensor) -> None:
        blocks = self._blocks(t)
        blocks.index_add_(1, self.keys, more.view(blocks.shape[0], len(self.keys), -1))

    def scores(
        self, q_tile: torch.Tensor, k_tile: torch.Tensor, scale: float
    ) -> torch.Tensor:
        scores = _products(q_tile, k_tile.transpose(1, 2), scale)
        if has_memory(scores):
            count = self.tiles.rows.shape[0]
            rows = self.tiles.rows.shape[1] * self.tiles.block
            views = scores.view(
                -1, count, q_tile.shape[1] // rows, rows, scores.shape[2]
            )
            if self.tiles.whole < self.tiles.keys.shape[1]:
                part = views[..., self.tiles.whole * self.tiles.block :]
                part += _block_bias(self.tiles, self.seen.pattern.causal)[:, None]
            hides = (self.seen.documents, self.seen.padding, self.seen.slopes)
            if any(each is not None for each in hides):
                self.seen.close(
                    views,
                    self._positions(self.tiles.rows),
                    self._positions(self.tiles.keys),
                    self.owner,
                )
        return scores

    def _blocks(self, t: torch.Tensor) -> torch.Tensor:
        """[heads, s, ..] → [heads, blocks, ..]."""
        return t.view(t.shape[0], t.shape[1] // self.tiles.block, -1)[self.some]

    def _positions(self, blocks: np.ndarray) -> torch.Tensor:
        """[t, blocks] → int64 [t, positions]."""
        within = torch.arange(self.tiles.block)
        return (
            torch.from_numpy(blocks)[..., None] * self.tiles.block + within
        ).flatten(1)


def _parts(
    seen: Visible, queries: torch.Tensor, samples: int
) -> Iterator[_RangePart | _BlockPart]:
    """The work of a call, in parts of some heads. Without memory one of the largest, of consecutive keys."""
    heads, s, r, _ = queries.shape
    if seen.pattern.layout is None:
        tiles = range_tiles(seen.pattern, s)
        kind = _RangePart
        most = SCORES
    else:
        tiles = block_tiles(seen.pattern, s, STACKED // min(heads * r, 8))
        kind = _BlockPart
        most = STACKED
    if not has_memory(queries):
        scores = min(heads * s, max(tile.scores for tile in tiles))
        tiles = [RangeTile(range(max(1, scores // s)), range(s))]
        kind = _RangePart
    for tile in tiles:
        step = max(1, most // (r * tile.scores))
        for first in range(0, heads, step):
            some = slice(first, min(first + step, heads))
            here = torch.arange(some.start, some.stop)
            yield kind(tile, _for_heads(seen, here, r), some, here * samples // heads)


def _for_heads(seen: Visible, heads: torch.Tensor, r: int) -> Visible:
    """The slopes of some key-value heads of all samples, [h, r]."""
    if seen.slopes is None:
        return seen
    of_groups = seen.slopes.view(-1, r)
    return replace(seen, slopes=of_groups[heads % len(of_groups)])


@lru_cache(maxsize=256)
def _edge_bias(
    pattern: AttentionPattern, rows: int, offset: int, columns: int
) -> np.ndarray:
    """fp32 [rows, columns], -inf where a query does not see a key.

    offset: from the first query to the first key
    Equal for all tiles but the first and the last ones of a sequence.
    """
    distance = np.arange(columns) + offset - np.arange(rows)[:, None]
    hidden = np.zeros((rows, columns), dtype=bool)
    if pattern.after is not None:
        hidden |= distance > pattern.after
    if pattern.left is not None:
        hidden |= distance < -pattern.left
    return np.where(hidden, np.float32(-math.inf), np.float32(0))


def _block_bias(tiles: BlockTiles, is_causal: bool) -> torch.Tensor:
    """[t, rows, keys of which queries see some], -inf where a query does not see a key: in hidden blocks, and
    above the diagonal."""
    seen = tiles.seen[..., tiles.whole :]
    keys = tiles.keys[:, tiles.whole :]
    block = tiles.block
    hidden = torch.from_numpy(~seen)
    bias = torch.zeros(hidden.shape).masked_fill_(hidden, -math.inf)
    bias = bias[:, :, None, :, None].expand(-1, -1, block, -1, block).contiguous()
    if is_causal:
        diagonal = (tiles.rows[:, :, None] == keys[:, None]) & seen
        tile, row, column = map(torch.from_numpy, np.nonzero(diagonal))
        bias[tile, row, :, column] = torch.full((block, block), -math.inf).triu(1)
    return bias.view(len(hidden), hidden.shape[1] * block, -1)


def _products(a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """scale * a b, of each matrix of two batches."""
    result = a.new_empty(len(a), a.shape[1], b.shape[2])
    return torch.baddbmm(result, a, b, beta=0, alpha=scale, out=result)


def _of_rows(sink: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The sink [n] of each row, [b g, s, r, 1] like the given."""
    heads, s, r, _ = like.shape
    of_heads = sink.detach().float().repeat(heads * r // len(sink)).view(heads, 1, r, 1)
    return of_heads.expand(-1, s, -1, -1).contiguous()


def _wide(*views: torch.Tensor) -> list[torch.Tensor]:
    """In fp32, keys of a head next to each other."""
    return [view.float().contiguous() for view in views]


def _as_given(t: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """[b g, s, d] → [s, b, g, d] in the dtype of `like`."""
    return t.transpose(0, 1).unflatten(1, like.shape[1:3]).to(like.dtype)
