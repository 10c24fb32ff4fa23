"""Attention compiled from csrc/attention/attention.cpp: in fp32 for AVX-512 and AVX2, in bf16 for AMX and AVX-512 BF16.

An optional extension. It keeps no probabilities: backward computes them again from the output and the
log-sum-exp. Tensors are read where they are, with the strides of parts of a packed projection. The work
falls with the scores that a pattern hides, to units of 16 queries and 16 keys.
"""

import functools
import logging
from collections.abc import Iterable, Sequence
from functools import lru_cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from ....host import load_compiled
from ....ops.attention_kernel import OfRows, ScoreBlock, places_of
from ....ops.attention_pattern import AttentionPattern
from ....ops.core_attention import attention
from ....ops.dropout import KeepMask
from ....ops.kernel_table import CPU
from ....ops.key_visibility import CAUSAL_KEYS, KeyVisibility
from ....ops.meta_tensors import has_memory
from ....ops.scoring import PLAIN, Scoring
from ....ops.widened_products import is_widened
from . import UNIT

if TYPE_CHECKING:
    from .key_spans import KeySpans

logger = logging.getLogger(__name__)

CHANNELS = range(32, 257, 32)  # of a head
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
NEEDS = {torch.float32: "neither AVX-512 nor AVX2", torch.bfloat16: "no AVX-512 BF16"}
# Bytes of packed keys and values in forward: of all threads for whole heads, of a thread at least, and of a
# thread where heads have more.
ALL_KEYS = 64 << 20
LEAST_KEYS = 4 << 20
SOME_KEYS = 2 << 20
# keys whose gradients are summed at a time in backward
RUN = 1024
LONG_RUN = 8192
BESIDE_WINDOW = 80  # keys that a tile of 64 queries sees besides those of a window
EVERYTHING = 1 << 40  # positions


@functools.cache
def extension() -> ModuleType | Any:
    """Return the compiled attention; None, with one line in the log, where the package was installed without a
    compiler."""
    return load_compiled(
        "_attention",
        "attention",
        "torch's products run instead, which are slower",
        logger,
    )


@functools.cache
def functions(dtype: torch.dtype) -> ModuleType | Any:
    """Return the compiled functions for a dtype, of the processor's fastest instruction set; None, if it has none."""
    if extension() is None:
        return None
    sets = [getattr(extension(), name) for name in extension().instruction_sets()]
    return next(
        (found for found in sets if hasattr(found, f"forward_{NAMES[dtype]}")), None
    )


def reason_against(dtype: torch.dtype) -> str:
    """Return why this machine has no compiled attention in fp32 or bf16; "" if it has."""
    if extension() is None:
        return "not compiled"
    return "" if functions(dtype) else NEEDS[dtype]


def suits(q: torch.Tensor, k: torch.Tensor, pattern: AttentionPattern) -> bool:
    """Return whether the kernel takes fp32 or bf16 tensors q [sq, b, n, d], the last queries, and k [sk, b, g, d] of
    a whole sequence."""
    has_rows = 1 < q.shape[0] and 0 < k.shape[0] and q.shape[1] > 0
    is_last = (
        q.shape[0] == k.shape[0]
        or pattern.layout is None
        and (pattern.after is None or q.shape[0] < k.shape[0])
    )
    return has_rows and is_last and takes(q, pattern, [range(k.shape[0])])


def takes(q: torch.Tensor, pattern: AttentionPattern, runs: Iterable[range]) -> bool:
    """Return whether the kernel takes fp32 or bf16 queries [.., d] of the CPU, and keys of these positions: layouts
    have blocks of a multiple of 16 tokens, and no window but a causal one."""
    if q.dtype not in NAMES or q.shape[-1] not in CHANNELS:
        return False
    if pattern.layout is None:
        return True
    has_window = (
        pattern.left is not None or not pattern.causal and pattern.right is not None
    )
    return (
        not has_window
        and pattern.layout.block % UNIT == 0
        and all(
            run.start % UNIT == 0 < len(run) and len(run) % UNIT == 0 for run in runs
        )
    )


def compiled_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block: ScoreBlock,
    scoring: Scoring,
) -> torch.Tensor:
    """q [sq, b, n, d], k and v [sk, b, g, d] → [sq, b, n * d]; any strides. A query that sees no key gets
    zeros."""
    return _CompiledAttention.apply(q, k, v, scoring.sink, block, scoring, True)[0]


def compiled_attention_not_kept(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block: ScoreBlock,
    scoring: Scoring,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output [sq, b, n, d], which backward does not keep, and the log-sum-exp fp32 [b, n, sq].

    Backward takes D = rowsum(dO ∘ O) as the gradient of the log-sum-exp: it is that of the caller.
    """
    out, lse = _CompiledAttention.apply(q, k, v, scoring.sink, block, scoring, False)
    return out.unflatten(2, (q.shape[2], -1)), lse


class _CompiledAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, sink, block, scoring, keeps_out):
        q, k, v = (_with_rows(t) for t in (q, k, v))
        if k.untyped_storage()._cdata != v.untyped_storage()._cdata:
            v = (
                v.contiguous()
            )  # else what is kept were the whole projection, for its values
        out, lse = attend(q, k, v, block, scoring)
        ctx.save_for_backward(q, k, v, sink, out if keeps_out else None, lse)
        ctx.block = block
        ctx.scoring = scoring
        ctx.set_materialize_grads(False)
        return out.view(*q.shape[:2], -1), lse

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, dots):
        q, k, v, sink, out, lse = ctx.saved_tensors
        dout = dout.reshape(q.shape)
        if out is not None:
            dots = row_dots(dout, out)
        dq, dk, dv = gradients(q, k, v, dout, OfRows(lse, dots), ctx.block, ctx.scoring)
        dsink = None
        if sink is not None:
            dsink = (
                -((sink.float()[:, None] - lse).exp() * dots).sum((0, 2)).to(sink.dtype)
            )
        return dq, dk, dv, dsink, None, None, None


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block: ScoreBlock,
    scoring: Scoring,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [sq, b, n, d], k and v [sk, b, g, d] → out [sq, b, n, d], and the log-sum-exp fp32 [b, n, sq], +inf
    of a query that sees no key. Without gradients."""
    out = q.new_empty(q.shape)
    lse = q.new_empty(q.shape[1], q.shape[2], q.shape[0], dtype=torch.float32)
    _run(
        "forward", "forward", (*map(_with_rows, (q, k, v)), out), (lse,), block, scoring
    )
    return out, lse


def row_dots(dout: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """D = rowsum(dO ∘ O) of [sq, b, n, d], fp32 [b, n, sq]."""
    dout = _with_rows(dout.to(out.dtype))
    out = _with_rows(out)
    rows, samples, heads, d = out.shape
    dots = out.new_empty(samples, heads, rows, dtype=torch.float32)
    if has_memory(out):
        getattr(functions(out.dtype), f"dots_{NAMES[out.dtype]}")(
            (rows, samples, heads, d),
            (_place(dout), _place(out)),
            dots.data_ptr(),
            torch.get_num_threads(),
        )
    return dots


def gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    rows: OfRows,
    block: ScoreBlock,
    scoring: Scoring,
) -> list[torch.Tensor]:
    """dq, dk, dv of what these queries and keys contribute. dout [sq, b, n, d] and `rows` are of all keys."""
    results = [t.new_empty(t.shape) for t in (q, k, v)]
    tensors = *map(_with_rows, (q, k, v, dout)), *results
    _run(
        "backward",
        "backward",
        tensors,
        tuple(t.contiguous() for t in rows),
        block,
        scoring,
    )
    return results


def add_gradients_(
    totals: Sequence[torch.Tensor],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    rows: OfRows,
    block: ScoreBlock,
    scoring: Scoring,
) -> None:
    """Add the `gradients` to totals: fp32 of the shapes of q, k and v, channels of a head next to each
    other. They are not rounded to the dtype of q first."""
    tensors = *map(_with_rows, (q, k, v, dout)), *totals
    _run(
        "add_gradients",
        "backward",
        tensors,
        tuple(t.contiguous() for t in rows),
        block,
        scoring,
    )


def _run(
    name: str,
    memory: str,
    tensors: tuple[torch.Tensor, ...],
    of_rows: tuple[torch.Tensor, ...],
    block: ScoreBlock,
    scoring: Scoring,
) -> None:
    """Call a function of the extension with as much memory as `memory`, forward or backward, needs."""
    q, k, *_ = tensors
    pattern = block.visible.pattern
    sizes = (
        q.shape[0],
        k.shape[0],
        *q.shape[1:3],
        *k.shape[2:],
        _packed_keys(memory, q, k, pattern),
    )
    # Each thread needs its own memory; a plan counts it, and computes nothing.
    threads = torch.get_num_threads()
    count = getattr(functions(q.dtype), f"{memory}_bytes_{NAMES[q.dtype]}")(sizes)
    work = q.new_empty(threads * count, dtype=torch.uint8)
    if not has_memory(q):
        return
    # The keys that are seen: spans of the pattern, bounds, documents and padding.
    plan = _spans(pattern, block.queries, block.keys, q.shape[2])
    positions = [
        EVERYTHING if count is None else count
        for count in (pattern.left, pattern.after)
    ]
    of_heads = scoring.sink, scoring.alibi.slopes if scoring.alibi else None
    numbers = [
        *_ids(block, q.shape[1]),
        *(None if t is None else t.detach().float().contiguous() for t in of_heads),
    ]
    # The extension takes addresses, 0 for what is not there.
    addresses = [
        t.ctypes.data
        for t in (
            plan.layout_of_head,
            plan.first,
            plan.spans,
            plan.units,
            plan.last_tile,
            plan.live,
        )
    ]
    addresses += [0 if t is None else t.data_ptr() for t in numbers]
    getattr(functions(q.dtype), f"{name}_{NAMES[q.dtype]}")(
        sizes,
        [_place(t) for t in tensors],
        [t.data_ptr() for t in of_rows],
        scoring.scale_of(q.shape[3]),
        (block.keys.start - block.queries.start, *positions),
        addresses,
        work.data_ptr(),
        threads,
    )


def _packed_keys(
    memory: str, q: torch.Tensor, k: torch.Tensor, pattern: AttentionPattern
) -> int:
    """Keys that a thread holds packed at a time.

    forward   all of a head, which serve all its queries; of long sequences as many as windows see. Queries
              that see more read keys where they are.
    backward  with the sums of their gradients. It works on so many at a time, while it holds dq of all
              queries; on all where several query heads share a key, since it would hold the dq of each.
              Queries of a layout are packed again for each such run, for a few of its keys: so their runs
              are long. With tiles (AMX), rows of the transposed keys of a long run would be too far apart.
    """
    keys = k.shape[0]
    if memory == "forward":
        of_key = 2 * k.shape[3] * k.element_size()
        whole = max(LEAST_KEYS, ALL_KEYS // torch.get_num_threads())
        return keys if keys * of_key <= whole else SOME_KEYS // of_key + BESIDE_WINDOW
    if q.shape[2] != k.shape[2]:
        return keys
    if pattern.layout is not None and not functions(q.dtype).has_tiles:
        return LONG_RUN
    return RUN if pattern.left is None else RUN + BESIDE_WINDOW


@lru_cache(maxsize=1024)
def _spans(
    pattern: AttentionPattern, queries: range, keys: range, heads: int
) -> "KeySpans":
    """`key_spans`, whose module is loaded where the kernel runs."""
    from .key_spans import key_spans

    return key_spans(pattern, queries, keys, heads)


def _ids(
    block: ScoreBlock, samples: int
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """int32 [samples, queries] and [samples, keys], padded to a multiple of `UNIT`: a query sees keys of its
    own id. None: of all."""
    documents = block.visible.documents
    mask = block.visible.mask
    if documents is None and mask is None:
        return None, None
    padding = None if mask is None else mask[:, 0, 0].expand(samples, -1)
    if documents is None:
        assert padding is not None, "there are documents or a mask"
        ids = torch.zeros_like(padding, dtype=torch.int32)
    else:
        ids = documents.ids.int()
    of_keys = ids if padding is None else ids.masked_fill(padding, -1)
    return (
        _padded(ids[:, block.queries.start : block.queries.stop]),
        _padded(of_keys[:, block.keys.start : block.keys.stop]),
    )


def _padded(ids: torch.Tensor) -> torch.Tensor:
    return F.pad(ids, (0, -ids.shape[1] % UNIT), value=-2).contiguous()


def _with_rows(t: torch.Tensor) -> torch.Tensor:
    """Return the tensor with the channels of a head next to each other, and rows that begin with a whole pair."""
    return t if t.stride(3) == 1 and t.stride(0) % 2 == 0 else t.contiguous()


def _place(t: torch.Tensor) -> tuple[int, int, int, int]:
    """Address, and the strides of positions, samples and heads."""
    return t.data_ptr(), t.stride(0), t.stride(1), t.stride(2)


def _suits_compiled(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: KeyVisibility = CAUSAL_KEYS,
    *,
    keep: KeepMask | None = None,
    scoring: Scoring = PLAIN,
) -> bool:
    is_scored = scoring.cap is None and not scoring.has_places
    is_known = keep is None and visible.hides_by_key and is_scored
    # Documents and padding are of keys.
    has_all_rows = (
        visible.mask is None and visible.documents is None or q.shape[0] <= k.shape[0]
    )
    return (
        is_known
        and has_all_rows
        and q.dtype == k.dtype == v.dtype
        and k.shape == v.shape
        and not is_widened(q)
        and suits(q, k, visible.pattern)
    )


@attention.kernel(
    "c++",
    devices=CPU,
    dtypes=(torch.float32,),
    suits=_suits_compiled,
    available=lambda: reason_against(torch.float32),
)
@attention.kernel(
    "c++",
    devices=CPU,
    dtypes=(torch.bfloat16,),
    suits=_suits_compiled,
    available=lambda: reason_against(torch.bfloat16),
)
def attention_of_keys(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: KeyVisibility = CAUSAL_KEYS,
    *,
    keep: None = None,
    scoring: Scoring = PLAIN,
) -> torch.Tensor:
    """`core_attention.attention` where the keys decide what is hidden."""
    block = ScoreBlock(visible, *places_of(q, k))
    return compiled_attention(q, k, v, block, scoring)
