"""Attention that needs its probabilities, by rows: only those of some queries are in memory at a time.

Dropout that is a function of (seed, sample, head, query, key) needs probabilities, which torch's fused kernels do
not have. For all queries they take b n s² numbers, several times. Here forward computes them for some queries, then
for the next; backward computes them again. It keeps q, k and v alone.

The masks of dropout are those of the same rows of the whole table, so results do not depend on the number of rows, but
for rounding. On CPUs, most keys that no query of a part sees are left out, half of a causal pattern, and
parts have fewer rows the longer the sequence is: memory is linear in the length, and near the caches.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch

from .dropout import KeepMask

ROWS = 512  # at most
CPU_PAIRS = 1 << 19  # of a query and a key, of a head at a time on a CPU
FEWEST_ROWS = 16


class RowPart(NamedTuple):
    """Some rows of the queries: where they are in the tensor, the keys that they may see, and what dropout keeps."""

    rows: slice
    keys: slice
    keep: KeepMask | None

    @property
    def positions(self) -> range:
        """Positions of the queries among the keys."""
        return range(self.rows.start, self.rows.stop)


# (q, k, v, sink, part) → [rows, b, n * d], of the queries of a part
Attend = Callable[..., torch.Tensor]
# queries → keys outside of which they see none
Seen = Callable[[range], slice]


def rows_at_once(q: torch.Tensor) -> int:
    """Rows of a part of q [s, b, n, d]. They depend on the length alone, not on the samples and heads of a rank."""
    if q.device.type != "cpu":
        return ROWS
    rows = CPU_PAIRS // max(1, len(q))
    return min(ROWS, max(FEWEST_ROWS, rows))


def parts_of(
    q: torch.Tensor, keep: KeepMask | None, seen: Seen | None = None
) -> Iterator[RowPart]:
    """All rows, some at a time. seen: None: all keys

    The last rows come first: later parts, of fewer keys, then fit into the memory that earlier ones have freed.
    """
    length = len(q)
    step = rows_at_once(q)
    for start in reversed(range(0, length, step)):
        stop = min(start + step, length)
        rows = slice(start, stop)
        keys = slice(0, length)
        if seen is not None:
            keys = seen(range(start, stop))
        of_rows = keep
        if keep is not None:
            of_rows = replace(keep, rows=keep.rows[rows], seen=keys)
        yield RowPart(rows, keys, of_rows)


def suits(q: torch.Tensor, k: torch.Tensor, keep: KeepMask | None) -> bool:
    """Return whether there are several parts; tokens that are no neighbours keep their mask for all rows."""
    if keep is not None and keep.picked is not None:
        return False
    return len(q) == len(k) and len(q) > rows_at_once(q)


def attention_by_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: torch.Tensor | None,
    keep: KeepMask | None,
    attend: Attend,
    seen: Seen | None = None,
) -> torch.Tensor:
    """q [s, b, n, d], k and v [s, b, g, d], sink [n] or None → [s, b, n * d]."""
    parts = list(parts_of(q, keep, seen))
    return _ByRows.apply(q, k, v, sink, parts, attend)


class _ByRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, sink, parts, attend):
        ctx.save_for_backward(q, k, v, sink)
        ctx.parts = parts
        ctx.attend = attend
        rows, samples, heads, _ = q.shape
        width = heads * v.shape[3]
        out = v.new_empty(rows, samples, width)
        for part in parts:
            keys = k[part.keys]
            values = v[part.keys]
            out[part.rows] = attend(q[part.rows], keys, values, sink, part)
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, sink = ctx.saved_tensors
        shared = [k, v]
        if sink is not None:
            shared.append(sink)
        dq = torch.empty_like(q)
        totals = [_wide_zeros(t) for t in shared]

        for part in ctx.parts:
            # the probabilities of these rows once more
            keys = k[part.keys]
            values = v[part.keys]
            used = [q[part.rows], keys, values, *shared[2:]]
            leaves = list(map(_leaf, used))
            of_sink = leaves[3] if sink is not None else None
            with torch.enable_grad():
                out = ctx.attend(*leaves[:3], of_sink, part)
            found = torch.autograd.grad(out, leaves, dout[part.rows])

            # queries have a gradient of one part, the others of all
            dq[part.rows] = found[0]
            of_keys, of_values = (total[part.keys] for total in totals[:2])
            used = [of_keys, of_values, *totals[2:]]
            for total, more in zip(used, found[1:], strict=True):
                total += more

        found = [_like(total, t) for total, t in zip(totals, shared, strict=True)]
        if sink is None:
            found.append(None)
        return dq, *found, None, None


def _like(total: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return total.to(t.dtype)


def _leaf(t: torch.Tensor) -> torch.Tensor:
    return t.detach().requires_grad_()


def _wide_zeros(t: torch.Tensor) -> torch.Tensor:
    """Return a sum of gradients of a tensor, in fp32 or wider."""
    dtype = torch.promote_types(t.dtype, torch.float32)
    return torch.zeros_like(t, dtype=dtype)
