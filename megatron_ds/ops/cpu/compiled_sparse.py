"""Attention to the blocks of keys that a layout shows, compiled from csrc/sparse_attention.cpp, for CPUs with
AVX-512: in fp32, and in bf16 with AVX-512 BF16.

An optional extension. It keeps no probabilities: backward computes them again from the output and the
log-sum-exp. The work falls with the scores that a layout hides, to units of 16 queries and 16 keys.
"""

import functools
import logging
from collections.abc import Iterable
from functools import lru_cache
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from ...host import load_compiled
from ..attention_pattern import AttentionPattern
from ..product import has_memory
from .block_spans import UNIT, block_spans

logger = logging.getLogger(__name__)

CHANNELS = range(32, 257, 32)           # of a head
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


@functools.cache
def extension() -> ModuleType | Any:
    """The compiled attention; None, with one line in the log, where the package was installed without a
    compiler."""
    return load_compiled("_sparse_attention", "attention to blocks of keys",
                         "torch's products run instead, slower on a CPU with AVX-512", logger)


def reason_against() -> str:
    """Why this machine has no compiled attention; "" if it has."""
    compiled = extension()
    if compiled is None:
        return "not compiled"
    return "" if compiled.has_vectors() else "no AVX-512"


def suits(q: torch.Tensor, k: torch.Tensor, pattern: AttentionPattern) -> bool:
    """Whether the kernel takes tensors q [s, b, n, d] and k [s, b, g, d] of a whole sequence."""
    has_rows = q.shape[0] == k.shape[0] and q.shape[1] > 0
    return has_rows and takes(q, pattern, [range(q.shape[0])])


def takes(q: torch.Tensor, pattern: AttentionPattern, runs: Iterable[range]) -> bool:
    """Whether the kernel takes queries [.., d] of the CPU, fp32 or bf16, and keys of these positions, and a
    layout alone, perhaps causal, of blocks of a multiple of 16 tokens."""
    layout = pattern.layout
    if layout is None or pattern.left is not None or not pattern.causal and pattern.right is not None:
        return False
    has_units = layout.block % UNIT == 0 and all(run.start % UNIT == 0 < len(run) and len(run) % UNIT == 0
                                                 for run in runs)
    has_products = q.dtype == torch.float32 or q.dtype == torch.bfloat16 and extension().has_products()
    return has_units and has_products and q.shape[-1] in CHANNELS


class Shown(NamedTuple):
    """What a query sees.

    pattern        a layout, perhaps causal
    queries, keys  their positions
    ids            int32 [b, queries] and [b, keys]: a query sees keys of its own id; None: of all
    """

    pattern: AttentionPattern
    queries: range
    keys: range
    ids: tuple[torch.Tensor, torch.Tensor] | None = None

    @classmethod
    def of(cls, pattern: AttentionPattern, queries: range, keys: range, documents: torch.Tensor | None,
           padding: torch.Tensor | None) -> "Shown":
        """documents: int64 [b, s], as in `attention_tiles.Seen`. padding: bool [b, s], True where no query
        sees a key."""
        if documents is None and padding is None:
            return cls(pattern, queries, keys)
        ids = torch.zeros_like(padding, dtype=torch.int32) if documents is None else documents.int()
        of_keys = ids if padding is None else ids.masked_fill(padding, -1)
        return cls(pattern, queries, keys, (ids[:, queries.start:queries.stop].contiguous(),
                                            of_keys[:, keys.start:keys.stop].contiguous()))


def compiled_sparse(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shown: Shown, scale: float,
                    sink: torch.Tensor | None = None) -> torch.Tensor:
    """q [s, b, n, d], k and v [s, b, g, d] → [s, b, n * d]; any strides. sink: [n], as in `Scoring`.

    A query that sees no key gets zeros.
    """
    return _CompiledSparse.apply(q, k, v, sink, shown, scale)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shown: Shown, scale: float,
           sink: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """q [sq, b, n, d], k and v [sk, b, g, d] → out [sq, b, n, d], and the log-sum-exp fp32 [b, n, sq], +inf
    of a query that sees no key. Without gradients."""
    out = q.new_empty(q.shape)
    lse = q.new_empty(q.shape[1], q.shape[2], q.shape[0], dtype=torch.float32)
    _run("forward", (*map(_with_rows, (q, k, v)), out), lse, shown, scale, sink)
    return out, lse


def gradients(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, dout: torch.Tensor,
              lse: torch.Tensor, shown: Shown, scale: float) -> list[torch.Tensor]:
    """dq, dk, dv of what these queries and keys contribute. out, dout [sq, b, n, d] and lse are those of all
    keys."""
    results = [t.new_empty(t.shape) for t in (q, k, v)]
    _run("backward", (*map(_with_rows, (q, k, v, out, dout)), *results), lse.contiguous(), shown, scale)
    return results


class _CompiledSparse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, sink, shown, scale):
        q, k, v = (_with_rows(t) for t in (q, k, v))
        if k.untyped_storage()._cdata != v.untyped_storage()._cdata:
            v = v.contiguous()              # else what is kept were the whole projection, for its values
        out, lse = attend(q, k, v, shown, scale, sink)
        ctx.save_for_backward(q, k, v, sink, out, lse)
        ctx.shown, ctx.scale = shown, scale
        return out.view(*q.shape[:2], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        q, k, v, sink, out, lse = ctx.saved_tensors
        dout = dout.reshape(q.shape)
        dq, dk, dv = gradients(q, k, v, out, dout, lse, ctx.shown, ctx.scale)
        dsink = None
        if sink is not None:
            of_row = (dout.float() * out).sum(-1).permute(1, 2, 0)                             # D [b, n, s]
            dsink = -((sink.float()[:, None] - lse).exp() * of_row).sum((0, 2)).to(sink.dtype)
        return dq, dk, dv, dsink, None, None


def _run(name: str, tensors: tuple[torch.Tensor, ...], lse: torch.Tensor, shown: Shown, scale: float,
         sink: torch.Tensor | None = None) -> None:
    q, k, *_ = tensors
    n, offset = q.shape[2], (shown.keys.start - shown.queries.start) // UNIT
    sizes, threads = (q.shape[0], k.shape[0], q.shape[1], n, *k.shape[2:], offset), torch.get_num_threads()
    count = getattr(extension(), f"{name}_bytes")(sizes, q.dtype == torch.float32)
    work = q.new_empty(threads * count, dtype=torch.uint8)
    if not has_memory(q):
        return
    plan, sinks = _spans(*shown[:3], n), None if sink is None else sink.detach().float().contiguous()
    addresses = [t.ctypes.data for t in (plan.layout_of_head, plan.first, plan.spans, plan.units)]
    addresses += [0 if t is None else t.data_ptr() for t in (*(shown.ids or (None, None)), sinks)]
    getattr(extension(), f"{name}_{NAMES[q.dtype]}")(
        sizes, [_place(t) for t in tensors], lse.data_ptr(), scale, shown.pattern.causal,
        addresses, work.data_ptr(), threads)


_spans = lru_cache(maxsize=1024)(block_spans)


def _with_rows(t: torch.Tensor) -> torch.Tensor:
    """The tensor with the channels of a head next to each other."""
    return t if t.stride(3) == 1 else t.contiguous()


def _place(t: torch.Tensor) -> tuple[int, int, int, int]:
    """Address, and the strides of positions, samples and heads."""
    return t.data_ptr(), t.stride(0), t.stride(1), t.stride(2)
