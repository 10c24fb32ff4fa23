"""Core attention: softmax(q kᵀ / sqrt(d)) v of the keys that each query sees, with grouped keys and values.

Shapes: s positions, b samples, n query heads, g key-value heads (g divides n; query head i reads key-value
head i // (n/g)), d channels. Queries may be fewer than keys: they are then the last ones (generation with a
key-value cache).

Implementations: torch's fused attention; `reference_attention` with dropout, since it needs the
probabilities. On a CPU, cpu/compiled_attention.py: in fp32 with AVX-512 or AVX2, in bf16 with AMX or AVX-512
BF16. Elsewhere cpu/blocked_attention.py for causal attention of medium length and for narrow windows, where
it is faster; cpu/tiled_attention.py for other windows, block layouts and sinks; and fp32 where the processor
has no matrix products of the dtype. On a GPU with Triton, what torch's fused attention needs a mask of all
scores for, or cannot do: gpu/flex_attention.py.
"""

from typing import Any, Protocol

import torch
import torch.nn.functional as F

from .attention_pattern import CAUSAL, AttentionPattern
from .cpu import compiled_attention
from .cpu.blocked_attention import blocked_attention, worth_blocking
from .cpu.compiled_attention import Shown
from .cpu.tiled_attention import Visible, tiled_attention, worth_tiling
from .cpu.widened_products import is_widened
from .dropout import KeepMask
from .gpu import flex_attention, flex_check
from .gpu.score_tiles import TILE
from .kernel_table import CPU, FLOATS, GPU, Operation, random_tensors
from .meta_tensors import has_memory
from .product import LOW
from .scoring import PLAIN, Scoring
from .softmax import forbidden, masked_softmax


@Operation
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    pattern: AttentionPattern = CAUSAL,
    mask: torch.Tensor | None = None,
    documents: Any = None,
    keep: KeepMask | None = None,
    scoring: Scoring = PLAIN,
) -> torch.Tensor:
    """q [sq, b, n, d], k and v [sk, b, g, d] → [sq, b, n * d].

    pattern    which keys a query sees
    mask       bool [b or 1, n or 1, sq or 1, sk], True = may not attend; in addition to the pattern
    documents  `data.documents.Documents` of the samples, with sq = sk: a query sees its own document only
    keep       dropout of the probabilities, an `ops.dropout.KeepMask`. They are kept for backward, so
               memory grows with sq * sk
    scoring    scale of the scores, and what joins them in the softmax
    """
    # Documents hide keys in the causal kernels only; elsewhere they join the mask.
    needs_scores = keep is not None or scoring.sink is not None
    is_bare = not needs_scores and mask is None and scoring.alibi is None
    if documents is not None and not (is_bare and pattern == CAUSAL):
        mask = _joined(mask, documents.foreign)
        documents = None
    mask = _joined(mask, _hidden(pattern, q.shape[0], k.shape[0], q.device))
    if needs_scores:
        return _reference(q, k, v, pattern.causal, mask, keep, scoring)
    sq = q.shape[0]
    sk = k.shape[0]
    queries, keys, values = (
        t.permute(1, 2, 0, 3) for t in (q, k, v)
    )  # [b, n or g, s, d], views
    # A causal pattern alone is an option of torch's kernels; anything else is a mask or a bias.
    plain_causal = (
        pattern.causal and is_bare and mask is None and documents is None and sq == sk
    )
    allowed = (
        None if documents is None else documents.bias(q.dtype)
    )  # added to the scores; None: all
    if documents is None and not plain_causal:
        hidden = forbidden(sq, sk, pattern.causal, mask, q.device)
        allowed = None if hidden is None else ~hidden
        if scoring.alibi is not None:
            bias = scoring.alibi.bias(range(sk - sq, sk), range(sk)).to(q.dtype)
            allowed = bias if hidden is None else bias.masked_fill(hidden, -torch.inf)
    if q.is_meta:
        return _merge_heads(_PlannedAttention.apply(queries, keys, values, allowed))
    # torch chooses a fused kernel.
    out = F.scaled_dot_product_attention(
        queries,
        keys,
        values,
        attn_mask=allowed,
        is_causal=plain_causal,
        scale=scoring.scale,  # [b, n, sq, d]
        enable_gqa=queries.shape[1] != keys.shape[1],
    )
    return _merge_heads(out)


attention.benchmark_sizes = ((4096, 128),)  # heads of 128 channels


@attention.example
def _attention_example(
    rows: int, width: int, dtype: torch.dtype, device: torch.device
) -> tuple:
    rows = max(
        rows, 2
    )  # with one key, gradients of queries and keys are 0, and roundings are left
    return tuple(
        random_tensors(dtype, device, (rows, 2, 4, width), *[(rows, 2, 2, width)] * 2)
    )


def _suits_compiled(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    pattern: AttentionPattern = CAUSAL,
    mask: torch.Tensor | None = None,
    documents: Any = None,
    keep: KeepMask | None = None,
    scoring: Scoring = PLAIN,
) -> bool:
    is_known = (
        keep is None
        and _is_padding(mask)
        and (scoring.alibi is None or scoring.alibi.places is None)
    )
    has_all_rows = (
        mask is None and documents is None or q.shape[0] <= k.shape[0]
    )  # of the ids of keys
    return (
        is_known
        and has_all_rows
        and q.dtype == k.dtype == v.dtype
        and k.shape == v.shape
        and not is_widened(q)
        and compiled_attention.suits(q, k, pattern)
    )


@attention.implementation(
    "c++",
    devices=CPU,
    dtypes=(torch.float32,),
    suits=_suits_compiled,
    available=lambda: compiled_attention.reason_against(torch.float32),
)
@attention.implementation(
    "c++",
    devices=CPU,
    dtypes=(torch.bfloat16,),
    suits=_suits_compiled,
    available=lambda: compiled_attention.reason_against(torch.bfloat16),
)
def _compiled(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scoring: Scoring = PLAIN,
    **shown: Any,
) -> torch.Tensor:
    return compiled_attention.compiled_attention(
        q, k, v, _shown(q, k, **shown), scoring
    )


def _shown(
    q: torch.Tensor,
    k: torch.Tensor,
    *,
    pattern: AttentionPattern = CAUSAL,
    mask: torch.Tensor | None = None,
    documents: Any = None,
    **_: None,
) -> Shown:
    ids = documents.ids if documents is not None and has_memory(q) else None
    sk = k.shape[0]
    return Shown.of(
        pattern, range(sk - q.shape[0], sk), range(sk), ids, _padding(mask, q)
    )


def _is_padding(mask: torch.Tensor | None) -> bool:
    """Whether a mask hides the same keys from all queries of a sample."""
    return mask is None or mask.shape[1:3] == (1, 1)


def _padding(mask: torch.Tensor | None, q: torch.Tensor) -> torch.Tensor | None:
    """bool [b, sk] of such a mask."""
    return None if mask is None else mask[:, 0, 0].expand(q.shape[1], -1)


def _suits_blocks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    pattern: AttentionPattern = CAUSAL,
    mask: torch.Tensor | None = None,
    keep: KeepMask | None = None,
    scoring: Scoring = PLAIN,
    **_: Any,
) -> bool:
    others = (mask, keep, scoring.sink, pattern.layout)
    is_whole = scoring.alibi is None or scoring.alibi.places is None
    return (
        is_whole
        and all(other is None for other in others)
        and worth_blocking(q, k, pattern)
    )


@attention.implementation("blocked", devices=CPU, suits=_suits_blocks)
def _blocked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    pattern: AttentionPattern = CAUSAL,
    documents: Any = None,
    scoring: Scoring = PLAIN,
    **_: None,
) -> torch.Tensor:
    whole = (
        documents if has_memory(q) else None
    )  # a plan counts what one document keeps: the most
    slopes = None if scoring.alibi is None else scoring.alibi.slopes
    return blocked_attention(
        q, k, v, scoring.scale_of(q.shape[-1]), whole, pattern, slopes
    )


def _suits_tiles(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    pattern: AttentionPattern = CAUSAL,
    mask: torch.Tensor | None = None,
    keep: KeepMask | None = None,
    scoring: Scoring = PLAIN,
    **_: Any,
) -> bool:
    if (
        q.shape[0] != k.shape[0]
        or q.dtype == torch.float64
        or keep is not None
        or not _is_padding(mask)
    ):
        return False
    has_bias = (
        scoring.sink is not None
        or scoring.alibi is not None
        and scoring.alibi.places is None
    )
    return has_bias or worth_tiling(k.shape[0], pattern)


@attention.implementation("tiled", devices=CPU, suits=_suits_tiles)
def _tiled(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    pattern: AttentionPattern = CAUSAL,
    mask: torch.Tensor | None = None,
    documents: Any = None,
    scoring: Scoring = PLAIN,
    **_: None,
) -> torch.Tensor:
    visible = Visible(pattern, documents if has_memory(q) else None, _padding(mask, q))
    return tiled_attention(q, k, v, visible, scoring)


@attention.implementation(
    "fp32", devices=CPU, dtypes=LOW, suits=lambda q, *_, **__: is_widened(q)
)
def _in_fp32(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **settings: Any
) -> torch.Tensor:
    return attention(q.float(), k.float(), v.float(), **settings).to(q.dtype)


def _suits_flex(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    pattern: AttentionPattern = CAUSAL,
    documents: Any = None,
    scoring: Scoring = PLAIN,
    **_: Any,
) -> bool:
    if (
        q.shape[0] != k.shape[0] or q.shape[0] <= TILE
    ):  # one tile: nothing can be skipped
        return False
    others = (documents, scoring.sink, scoring.alibi)
    return not pattern.is_plain or any(other is not None for other in others)


def _fits_flex(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    keep: KeepMask | None = None,
    scoring: Scoring = PLAIN,
    **_: Any,
) -> str:
    if keep is not None:
        return "dropout of probabilities"
    if not _is_padding(mask):
        return "a mask that differs between queries or heads"
    if scoring.alibi is not None and scoring.alibi.places is not None:
        return "ALiBi of tokens that are no neighbours"
    reason = flex_attention.fits(q, k, v)
    if reason or not q.is_cuda:  # a plan assumes that the check succeeds
        return reason
    return flex_check.reason_against(
        flex_attention.compiled_apart, reference_attention, q.dtype, q.device
    )


@attention.implementation(
    "flex",
    devices=GPU,
    dtypes=FLOATS,
    suits=_suits_flex,
    fits=_fits_flex,
    available=flex_attention.reason_against,
)
def _flex(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    pattern: AttentionPattern = CAUSAL,
    mask: torch.Tensor | None = None,
    documents: Any = None,
    scoring: Scoring = PLAIN,
    **_: None,
) -> torch.Tensor:
    return flex_attention.flex_attention(q, k, v, pattern, documents, mask, scoring)


class OutputExchange(Protocol):
    """Sends the output of attention to other ranks, which return its gradient: a function with gradients of
    [sq, b, n, d] → [rows, b, heads, d], what this rank has of all outputs. Collective."""

    def __call__(self, out: torch.Tensor) -> torch.Tensor:
        """Exchange an output that attention keeps."""

    def of_rows(self, out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        """Exchange an output that attention does not keep.

        The gradient of lse, fp32 [b, n, sq], is D = rowsum(dO ∘ O).
        """


def exchanged_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    exchange: OutputExchange,
    *,
    scoring: Scoring = PLAIN,
    **settings: Any,
) -> torch.Tensor:
    """`attention` and an exchange of its output → [rows, b, heads * d]. The compiled kernel keeps no output:
    the exchange keeps its result."""
    if attention.choice(q, k, v, scoring=scoring, **settings) is _compiled:
        parts = compiled_attention.compiled_attention_not_kept(
            q, k, v, _shown(q, k, **settings), scoring
        )
        return exchange.of_rows(*parts).flatten(2)
    out = attention(q, k, v, scoring=scoring, **settings)
    return exchange(out.unflatten(2, (q.shape[2], -1))).flatten(2)


def reference_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    pattern: AttentionPattern = CAUSAL,
    mask: torch.Tensor | None = None,
    keep: KeepMask | None = None,
    scoring: Scoring = PLAIN,
) -> torch.Tensor:
    """`attention` in elementary operations, on any device; the softmax in fp32."""
    mask = _joined(mask, _hidden(pattern, q.shape[0], k.shape[0], q.device))
    return _reference(q, k, v, pattern.causal, mask, keep, scoring)


def _reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    mask: torch.Tensor | None,
    keep: KeepMask | None,
    scoring: Scoring,
) -> torch.Tensor:
    (sq, b, n, d), (sk, _, g, _) = q.shape, k.shape
    queries = q.permute(1, 2, 0, 3).reshape(b, g, n // g, sq, d)
    keys, values = (
        t.permute(1, 2, 0, 3).unsqueeze(2) for t in (k, v)
    )  # [b, g, 1, sk, d]
    scores = (queries * scoring.scale_of(d)) @ keys.transpose(
        -1, -2
    )  # [b, g, n/g, sq, sk]
    scores = scores.reshape(b, n, sq, sk)
    if scoring.alibi is not None:
        scores = (scores + scoring.alibi.bias(range(sk - sq, sk), range(sk))).to(
            scores.dtype
        )
    p = masked_softmax(scores, mask, causal, 1.0, keep, scoring.sink)
    out = p.reshape(b, g, n // g, sq, sk) @ values
    return _merge_heads(out.reshape(b, n, sq, d))


def _hidden(
    pattern: AttentionPattern, sq: int, sk: int, device: torch.device
) -> torch.Tensor | None:
    """bool [1, n or 1, sq, sk], True where a window or a layout hides a key; None: nothing."""
    if pattern.is_plain:
        return None
    return pattern.mask(
        torch.arange(sk - sq, sk, device=device), torch.arange(sk, device=device)
    )


def _joined(*masks: torch.Tensor | None) -> torch.Tensor | None:
    given = [mask for mask in masks if mask is not None]
    if not given:
        return None
    return given[0] if len(given) == 1 else given[0] | given[1]


class _PlannedAttention(torch.autograd.Function):
    # On the meta device torch would write attention out, scores and all. This keeps what its fused kernels
    # keep on GPUs, by their documentation: the arguments, a mask as numbers to be added, the output in the
    # memory order [b, s, n, d], and the logarithm of each row's sum in fp32.

    @staticmethod
    def forward(ctx, queries, keys, values, allowed):
        b, n, s, d = queries.shape
        out = queries.new_empty(b, s, n, d).transpose(1, 2)
        if allowed is not None and allowed.dtype is torch.bool:
            allowed = queries.new_empty(allowed.shape)
        sums = queries.new_empty(queries.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(queries, keys, values, allowed, out, sums)
        return out

    @staticmethod
    def backward(ctx, dout):
        queries, keys, values, *_ = ctx.saved_tensors
        return (
            torch.empty_like(queries),
            torch.empty_like(keys),
            torch.empty_like(values),
            None,
        )


def _merge_heads(out: torch.Tensor) -> torch.Tensor:
    """[b, n, s, d] → [s, b, n * d]; on CPU no copy: fused attention keeps the queries' memory order."""
    return out.permute(2, 0, 1, 3).flatten(2)
