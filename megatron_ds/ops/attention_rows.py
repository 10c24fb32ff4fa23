"""Attention that needs its probabilities, by rows: only those of some queries are in memory at a time.

Dropout that is a function of (seed, sample, head, query, key) needs probabilities, which torch's fused kernels do
not have. For all queries they take b n s² numbers, several times. Here forward computes them for ROWS
queries, then for the next; backward computes them again. It keeps q, k and v alone.

The masks of dropout are those of the same rows of the whole table, so results do not depend on ROWS, but for
rounding.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch

from .dropout import KeepMask

ROWS = 512


class RowPart(NamedTuple):
    """Some rows of the queries: where they are in the tensor, and what dropout keeps of theirs."""

    rows: slice
    keep: KeepMask | None

    @property
    def positions(self) -> range:
        """Positions of the queries among the keys."""
        return range(self.rows.start, self.rows.stop)


# (q, k, v, sink, part) → [rows, b, n * d], of the queries of a part
Attend = Callable[..., torch.Tensor]


def parts_of(length: int, keep: KeepMask | None) -> Iterator[RowPart]:
    """All rows, ROWS at a time."""
    for start in range(0, length, ROWS):
        stop = min(start + ROWS, length)
        rows = slice(start, stop)
        of_rows = keep
        if keep is not None:
            of_rows = replace(keep, rows=keep.rows[rows])
        yield RowPart(rows, of_rows)


def suits(q: torch.Tensor, k: torch.Tensor, keep: KeepMask | None) -> bool:
    """Whether there are several parts; tokens that are no neighbours keep their mask for all rows."""
    if keep is not None and keep.picked is not None:
        return False
    return len(q) == len(k) and len(q) > ROWS


def attention_by_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: torch.Tensor | None,
    keep: KeepMask | None,
    attend: Attend,
) -> torch.Tensor:
    """q [s, b, n, d], k and v [s, b, g, d], sink [n] or None → [s, b, n * d]."""
    parts = list(parts_of(len(q), keep))
    return _ByRows.apply(q, k, v, sink, parts, attend)


class _ByRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, sink, parts, attend):
        ctx.save_for_backward(q, k, v, sink)
        ctx.parts = parts
        ctx.attend = attend
        outputs = [attend(q[part.rows], k, v, sink, part) for part in parts]
        return torch.cat(outputs)

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
            leaves = [_leaf(t) for t in (q[part.rows], *shared)]
            of_sink = leaves[3] if sink is not None else None
            with torch.enable_grad():
                out = ctx.attend(*leaves[:3], of_sink, part)
            found = torch.autograd.grad(out, leaves, dout[part.rows])

            # queries have a gradient of one part, the others of all
            dq[part.rows] = found[0]
            for total, more in zip(totals, found[1:], strict=True):
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
    """A sum of gradients of a tensor, in fp32 or wider."""
    dtype = torch.promote_types(t.dtype, torch.float32)
    return torch.zeros_like(t, dtype=dtype)
