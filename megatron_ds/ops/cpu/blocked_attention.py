"""Causal attention on CPU by blocks of queries: batched matrix products and torch's softmax kernel.

torch's fused attention for CPU works head by head on tiles that are small for a matrix product. Here a block
of queries of all heads is multiplied with the keys that it may see, so the products run at full speed, and
of the upper triangle only half a block per row is computed. The probabilities are kept for backward: s * s /
2 numbers a head.

Measured on one core of an AMD EPYC, forward and backward, times as fast as torch's: 1.2 for 128 positions,
1.3 for 256 and 1.5 for 512 (d = 64), 1.7 with grouped queries; 1.0 for 1024, 0.9 below 64. In bf16 2.3 to 3
up to 512, 1.5 for 1024. On two cores the gain is smaller, and 1.0 for 1024. `worth_blocking` follows from
this.

In 16 bits the scores and their softmax are fp32, as in torch's, and so are the sums of dk and dv over the
blocks; the other products round to 16 bits, and the probabilities are kept in 16 bits. Where a processor has
no matrix products of the dtype (`product`), all products are in fp32 and round nothing: queries, keys and
values are converted for the duration of the call.

    queries   | block 0 |  sees keys [0, B)         s positions, b samples, n query heads, g key-value heads,
              | block 1 |  sees keys [0, 2B)        r = n/g queries that share a key, d channels,
              | block 2 |  sees keys [0, 3B)        B rows of a block

If samples hold several documents, a block sees the keys from the start of its first query's document on, and
with a window those from its first query's first key on, so the work decreases with the number of documents
and with the window.

The formulas of backward are those of Dao et al. 2022 (arXiv:2205.14135), appendix B.2.
"""

import math
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ..alibi import add_alibi_
from ..attention_pattern import CAUSAL, AttentionPattern
from .head_views import heads_first, key_view, query_view, rows_first, samples_of
from .widened_products import is_widened

KERNELS = (
    torch.float32,
    torch.bfloat16,
)  # dtypes with fast matrix products and softmax
BLOCK = 64  # rows of a block
BLOCK_OF_16_BITS = (
    128  # whose products are faster, so that the overhead of an operation weighs more
)
TILE = 1 << 20  # scores worked on at once: 4 MiB, two of them in backward


def worth_blocking(
    q: torch.Tensor, k: torch.Tensor, pattern: AttentionPattern = CAUSAL
) -> bool:
    """Whether `blocked_attention` is faster, and keeps at most four times the memory of the queries."""
    return (
        q.device.type == "cpu"
        and (q.dtype in KERNELS or is_widened(q))
        and q.shape[0] == k.shape[0]
        and pattern.causal
        and q.shape[0] >= 2 * BLOCK
        and is_worth_blocking(
            max(2 * BLOCK, seen_of(q.shape[0], q.dtype, pattern)), q.shape[3]
        )
    )


def is_worth_blocking(positions: int, channels: int) -> bool:
    """`worth_blocking`, for a head of these sizes on a CPU, in a dtype that it accepts, without a window."""
    return 2 * BLOCK <= positions <= 8 * channels


def seen_of(positions: int, dtype: torch.dtype, pattern: AttentionPattern) -> int:
    """Most keys that a block of queries sees."""
    return (
        positions
        if pattern.left is None
        else min(positions, pattern.left + rows_of_block(dtype))
    )


def blocked_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    documents: Any = None,
    pattern: AttentionPattern = CAUSAL,
    slopes: torch.Tensor | None = None,
) -> torch.Tensor:
    """q [s, b, n, d], k and v [s, b, g, d] → [s, b, n * d]; any strides. documents: as `attention`.

    pattern: causal, perhaps with a window
    slopes: fp32 [n], of ALiBi, which is added to the scores of a block at a time
    """
    return _BlockedAttention.apply(q, k, v, scale, documents, pattern, slopes)


class _BlockedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, scale, documents, pattern, slopes):
        s, b, n, d = q.shape
        slopes = (
            None if slopes is None else slopes.view(k.shape[2], -1).repeat(b, 1)
        )  # [b g, r]
        out = q.new_empty(s, b, n * d)
        result = query_view(out.view(q.shape), k)
        queries, keys, values = _factors(q, k, v)
        # the same if fp32
        wide_queries = queries.float()
        wide_keys = keys.float()
        work = _Workspace(queries, 2, torch.float32, pattern)
        kept = []
        for heads, rows, seen in _tiles(queries, documents, pattern):
            scores = _scores(
                wide_queries[heads, rows],
                wide_keys[heads, seen],
                rows,
                seen,
                scale,
                work,
            )
            if slopes is not None:
                positions = (
                    torch.arange(part.start, part.stop) for part in (rows, seen)
                )
                add_alibi_(
                    scores.unflatten(1, (n // k.shape[2], -1)),
                    slopes[heads],
                    *positions,
                )
            _mask_before_window(scores, pattern, rows, seen)
            if documents is not None:
                _mask_other_documents(
                    scores, documents, len(queries), heads, rows, seen
                )
            p = _probabilities(scores, q.dtype, work)  # [heads, r B, seen]
            kept.append(p.to(q.dtype))
            p = p if values.dtype == p.dtype else kept[-1]
            result[heads, rows] = rows_first(p.bmm(values[heads, seen]), result)
        ctx.save_for_backward(
            *((q, k, v) if is_widened(q) else (queries, keys, values)), *kept
        )
        ctx.scale = scale
        ctx.q_shape = q.shape
        ctx.k_shape = k.shape
        ctx.documents = documents
        ctx.pattern = pattern
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        queries, keys, values, *kept = ctx.saved_tensors
        dq = dout.new_empty(ctx.q_shape)
        dk, dv = (dout.new_empty(ctx.k_shape, dtype=torch.float32) for _ in range(2))
        if is_widened(dout):
            queries, keys, values = _factors(queries, keys, values)
        dqueries = query_view(dq, dk)
        dkeys = key_view(dk)
        dvalues = key_view(dv)
        dresult = _ready(query_view(dout.view(ctx.q_shape), dk))
        work = _Workspace(queries, 2 + is_widened(dout), queries.dtype, ctx.pattern)
        sees_all = ctx.documents is None and ctx.pattern.is_plain
        if not sees_all:
            dk.zero_(), dv.zero_()
        tiles = _tiles(queries, ctx.documents, ctx.pattern)
        for p, (heads, rows, seen) in zip(reversed(kept), reversed(tiles), strict=True):
            # Without documents and window the last block of queries sees all keys: it is first, and writes;
            # the others add.
            writes = sees_all and seen.stop == queries.shape[1]
            put = torch.Tensor.copy_ if writes else torch.Tensor.add_
            p = p if p.dtype == values.dtype else work.tile(2, p.shape).copy_(p)
            q_tile = heads_first(queries[heads, rows])
            do_tile = heads_first(dresult[heads, rows])
            put(dvalues[heads, seen], p.transpose(1, 2).bmm(do_tile))  # dv = pᵀ do
            dp = torch.bmm(
                do_tile, values[heads, seen].transpose(1, 2), out=work.tile(0, p.shape)
            )
            ds = work.tile(1, p.shape)  # p (dp - Σ p dp)
            torch.ops.aten._softmax_backward_data.out(dp, p, -1, p.dtype, grad_input=ds)
            dq_tile = rows_first(ds.bmm(keys[heads, seen]), dqueries)
            torch.mul(dq_tile, ctx.scale, out=dqueries[heads, rows])
            put(dkeys[heads, seen], ds.transpose(1, 2).bmm(q_tile))  # dk = scale dsᵀ q
        dk.mul_(ctx.scale)
        return dq, dk.to(dout.dtype), dv.to(dout.dtype), None, None, None, None


class _Workspace:
    """Reused memory for tiles of scores: it stays in the cache, as new tensors would not. It belongs to one
    call: kept longer (`product.WORKSPACE`) it would be allocated, unused, beside the logits, at the peak."""

    def __init__(
        self,
        queries: torch.Tensor,
        tiles: int,
        dtype: torch.dtype,
        pattern: AttentionPattern,
    ):
        heads, s, r, _ = queries.shape
        of_head = r * rows_of_block(queries.dtype) * seen_of(s, queries.dtype, pattern)
        scores = min(heads, _heads_at_once(queries, pattern)) * of_head
        self.memory = queries.new_empty(tiles, scores, dtype=dtype)

    def tile(self, index: int, shape: tuple[int, ...]) -> torch.Tensor:
        return self.memory[index, : math.prod(shape)].view(shape)


def _factors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
    """Queries, keys and values with the heads in front, in the dtype and order of the products."""
    return [_ready(t) for t in (query_view(q, k), key_view(k), key_view(v))]


def _ready(view: torch.Tensor) -> torch.Tensor:
    """The tensor in fp32 if the CPU has no matrix product of its dtype. Products of fp32 take any strides;
    those of bf16 would copy every tile."""
    if is_widened(view):
        return view.float()
    return view if view.dtype == torch.float32 else view.contiguous()


def _tiles(
    queries: torch.Tensor, documents: Any, pattern: AttentionPattern
) -> list[tuple[slice, slice, slice]]:
    """(heads, rows, keys seen) as slices: some key-value heads, a block of positions, and the positions from
    the start of the block's first document or window to the block's last."""
    heads, s, _, _ = queries.shape
    step = _heads_at_once(queries, pattern)
    block = rows_of_block(queries.dtype)
    tiles = []
    for first in range(0, heads, step):
        some = slice(first, min(first + step, heads))
        for start in range(0, s, block):
            rows = slice(start, min(start + block, s))
            begin = pattern.keys_of(range(start, rows.stop), range(s)).start
            if documents:
                samples = samples_of(some, heads, len(documents.ids))
                begin = max(begin, int(documents.starts[samples, start].amin()))
            tiles.append((some, rows, slice(begin, rows.stop)))
    return tiles


def _heads_at_once(queries: torch.Tensor, pattern: AttentionPattern) -> int:
    _, s, r, _ = queries.shape
    return max(
        1,
        TILE // (r * rows_of_block(queries.dtype) * seen_of(s, queries.dtype, pattern)),
    )


def rows_of_block(dtype: torch.dtype) -> int:
    """Rows of a block of queries. dtype: of the products"""
    return BLOCK if dtype == torch.float32 else BLOCK_OF_16_BITS


def _scores(
    q_tile: torch.Tensor,
    k_tile: torch.Tensor,
    rows: slice,
    seen: slice,
    scale: float,
    work: _Workspace,
) -> torch.Tensor:
    """scale * q kᵀ of a block with the keys that it sees, -inf in the future within the block: [heads, r B,
    seen].
    """
    heads, block, r, _ = q_tile.shape
    scores = work.tile(0, (heads, r * block, k_tile.shape[1]))
    torch.baddbmm(
        scores,
        heads_first(q_tile),
        k_tile.transpose(1, 2),
        beta=0,
        alpha=scale,
        out=scores,
    )
    future = torch.full((block, block), -math.inf).triu(1)
    scores.unflatten(1, (r, block))[..., rows.start - seen.start :].add_(future)
    return scores


def _mask_before_window(
    scores: torch.Tensor, pattern: AttentionPattern, rows: slice, seen: slice
) -> None:
    """-inf where a key is before the window of the query, in place: as many columns have such as rows."""
    queries = torch.arange(rows.start, rows.stop)
    keys = torch.arange(seen.start, min(seen.stop, seen.start + len(queries)))
    if pattern.left is None or rows.stop - 1 - pattern.left <= seen.start:
        return
    before = torch.zeros(len(queries), len(keys))
    before.masked_fill_(queries[:, None] - keys > pattern.left, -math.inf)
    scores.unflatten(1, (-1, len(queries)))[..., : len(keys)].add_(before)


def _mask_other_documents(
    scores: torch.Tensor,
    documents: Any,
    total: int,
    heads: slice,
    rows: slice,
    seen: slice,
) -> None:
    """-inf where query and key are of different documents, in place; most tiles need nothing."""
    samples = samples_of(heads, total, len(documents.ids))
    if int(documents.starts[samples, rows.stop - 1].amax()) <= seen.start:
        return
    ids = documents.ids[samples]
    closed = ids[:, rows, None] != ids[:, None, seen]  # [samples, B, seen]
    owner = (
        torch.arange(heads.start, heads.stop) * documents.ids.shape[0] // total
        - samples.start
    )
    scores.unflatten(1, (-1, rows.stop - rows.start)).masked_fill_(
        closed[owner][:, None], -math.inf
    )


def _probabilities(
    scores: torch.Tensor, kept: torch.dtype, work: _Workspace
) -> torch.Tensor:
    """softmax(scores), in new memory if backward keeps it in this dtype."""
    return torch.softmax(
        scores, dim=-1, out=None if kept == scores.dtype else work.tile(1, scores.shape)
    )
