"""Core attention: softmax(q kᵀ / sqrt(d)) v of the keys that each query sees, with grouped keys and values.

Shapes: s positions, b samples, n query heads, g key-value heads (g divides n; query head i reads key-value
head i // (n/g)), d channels. Queries may be fewer than keys: they are then the last ones (generation with a
key-value cache).

Values may have fewer channels than keys; results then have those of the values.

Implementations: torch's fused attention, with a mask of all scores for what is not plain or causal;
`reference_attention` with dropout, a sink or a cap of the scores, since these need the probabilities; for long
sequences rows of queries one part after another (attention_rows.py), so that memory does not grow with the square of
the length. On a CPU fp32 where the processor has no matrix products of the dtype. Kernels (extensions/kernels):
compiled attention of CPUs; on GPUs FlexAttention for what torch's fused attention needs a mask for, or cannot do.
"""

from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from . import attention_rows
from .attention_kernel import ScoreBlock, attention_kernel, places_of
from .attention_pattern import CAUSAL, FULL
from .dropout import KeepMask
from .kernel_table import CPU, GPU, Operation, random_tensors
from .key_visibility import CAUSAL_KEYS, KeyVisibility
from .product import LOW
from .scoring import PLAIN, Scoring
from .softmax import forbidden, masked_softmax
from .widened_products import is_widened
from .work import CallWork, bytes_of, report

SIZES = 16  # numbers of keys that parts of a sequence have


@Operation
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: KeyVisibility = CAUSAL_KEYS,
    *,
    keep: KeepMask | None = None,
    scoring: Scoring = PLAIN,
) -> torch.Tensor:
    """q [sq, b, n, d], k and v [sk, b, g, d] → [sq, b, n * d].

    visible  which keys a query sees; with documents sq = sk
    keep     dropout of the probabilities, an `ops.dropout.KeepMask`
    scoring  scale of the scores, and what joins them in the softmax
    """
    is_simple = visible is CAUSAL_KEYS and scoring is PLAIN and keep is None
    if not is_simple and _is_written_out(keep, scoring):
        return reference_attention(q, k, v, visible, keep=keep, scoring=scoring)
    # [b, n or g, s, d], views
    queries = q.permute(1, 2, 0, 3)
    keys = k.permute(1, 2, 0, 3)
    values = v.permute(1, 2, 0, 3)
    # A causal pattern alone is an option of torch's kernels; anything else is a mask or a bias.
    is_causal = q.shape[0] == k.shape[0] and (
        is_simple
        or visible.is_plain
        and visible.pattern.causal
        and scoring.alibi is None
    )
    allowed = None if is_causal else _allowed(q, k, visible, scoring)
    if q.is_meta:
        work = attention_work(q, k, v, visible)
        return _merge_heads(
            _PlannedAttention.apply(queries, keys, values, allowed, work)
        )
    # torch chooses a fused kernel.
    out = F.scaled_dot_product_attention(
        queries,
        keys,
        values,
        attn_mask=allowed,
        is_causal=is_causal,
        scale=scoring.scale,  # [b, n, sq, d]
        enable_gqa=queries.shape[1] != keys.shape[1],
    )
    return _merge_heads(out)


def _is_written_out(keep: KeepMask | None, scoring: Scoring) -> bool:
    """Return whether torch's fused attention cannot compute the probabilities."""
    return keep is not None or scoring.sink is not None or scoring.cap is not None


def _allowed(
    q: torch.Tensor, k: torch.Tensor, visible: KeyVisibility, scoring: Scoring
) -> torch.Tensor | None:
    """Return the mask of torch's attention: bool, True where a query sees a key; or numbers to be added to scores."""
    is_bare = visible.mask is None and scoring.alibi is None
    if visible.documents is not None and is_bare and visible.pattern == CAUSAL:
        return visible.documents.bias(q.dtype)  # one for all layers
    hidden = _hidden(q, k, visible)
    if scoring.alibi is None:
        return None if hidden is None else ~hidden
    bias = scoring.alibi.bias(*places_of(q, k)).to(q.dtype)
    return bias if hidden is None else bias.masked_fill(hidden, -torch.inf)


def _hidden(
    q: torch.Tensor, k: torch.Tensor, visible: KeyVisibility
) -> torch.Tensor | None:
    """bool, True where a query does not see a key; None: nowhere, as of a single causal query."""
    mask = visible.hidden_besides_later(*places_of(q, k), q.device)
    return forbidden(q.shape[0], k.shape[0], visible.pattern.causal, mask, q.device)


@attention.states_work()
def attention_work(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: KeyVisibility = CAUSAL_KEYS,
    **_: object,
) -> CallWork:
    """Return the work of a fused kernel: half of the scores where the pattern is causal, those of a window in it.
    Documents and masks do not count: a plan does not know them."""
    heads = q.shape[1] * q.shape[2]
    key_width = q.shape[3]
    pairs = visible.pattern.pairs(k.shape[0]) * q.shape[0] / k.shape[0]
    flops = 2.0 * heads * pairs * (key_width + v.shape[3])
    moved = (
        sum(map(bytes_of, (q, k, v)))
        + q.numel() // key_width * v.shape[3] * q.element_size()
    )
    return CallWork(scores=flops, nbytes=moved, dtype=q.dtype)


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


@attention.implementation(
    "fp32", devices=CPU, dtypes=LOW, suits=lambda q, *_, **__: is_widened(q)
)
def _in_fp32(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: KeyVisibility = CAUSAL_KEYS,
    *,
    keep: KeepMask | None = None,
    scoring: Scoring = PLAIN,
) -> torch.Tensor:
    wide = (t.float() for t in (q, k, v))
    return attention(*wide, visible, keep=keep, scoring=scoring).to(q.dtype)


def _suits_padded(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: object, **settings: Any
) -> bool:
    return q.shape[3] != v.shape[3] and not _is_written_out(
        settings.get("keep"), settings.get("scoring", PLAIN)
    )


@attention.implementation("padded", devices=CPU, suits=_suits_padded)
def _padded(q: torch.Tensor, *others: Any, **settings: Any) -> torch.Tensor:
    # Fused kernels of CPUs take one width, and torch would write attention out.
    from .head_widths import padded

    return padded(attention, q, *others, **settings)


def _suits_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: KeyVisibility = CAUSAL_KEYS,
    *,
    keep: KeepMask | None = None,
    scoring: Scoring = PLAIN,
) -> bool:
    return (
        _is_written_out(keep, scoring)
        and not scoring.has_places
        and attention_rows.suits(q, k, keep)
    )


@attention.implementation("rows", devices=CPU + GPU, suits=_suits_rows)
def _by_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: KeyVisibility = CAUSAL_KEYS,
    *,
    keep: KeepMask | None = None,
    scoring: Scoring = PLAIN,
) -> torch.Tensor:
    def attend(queries, keys, values, sink, part):
        # What these queries see is a mask, also the keys behind them.
        first = part.keys.start
        shown = range(first, part.keys.stop)
        hidden = visible.hidden(part.positions, shown, queries.device)
        return reference_attention(
            queries,
            keys,
            values,
            KeyVisibility(FULL, mask=hidden),
            keep=part.keep,
            scoring=replace(scoring, sink=sink),
            positions=range(part.rows.start - first, part.rows.stop - first),
        )

    # On a GPU the kernel of the softmax draws the numbers of whole rows, so it gets all keys.
    is_cut = q.device.type == "cpu"
    seen = partial(_seen, len(k), visible, scoring) if is_cut else None
    return attention_rows.attention_by_rows(q, k, v, scoring.sink, keep, attend, seen)


def _seen(
    length: int, visible: KeyVisibility, scoring: Scoring, queries: range
) -> slice:
    """Keys of a whole sequence outside of which these queries see none.

    They begin and end at multiples of a sixteenth of the length: tensors of many sizes would leave holes in the memory
    of the process, several times what one part needs.
    """
    pattern = visible.pattern
    unit = -(-length // SIZES)
    # The bias of ALiBi is made from the first key on, so that its roundings are those of all keys.
    first = 0
    if pattern.left is not None and scoring.alibi is None:
        first = max(0, queries.start - pattern.left)
    stop = length if pattern.after is None else queries.stop + pattern.after
    return slice(first // unit * unit, min(length, -(-stop // unit) * unit))


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
    visible: KeyVisibility,
    *,
    exchange: OutputExchange,
    keep: KeepMask | None = None,
    scoring: Scoring = PLAIN,
) -> torch.Tensor:
    """`attention` and an exchange of its output → [rows, b, heads * d]. The compiled kernel keeps no output:
    the exchange keeps its result."""
    settings = {"keep": keep, "scoring": scoring}
    kernel = attention_kernel()
    chosen = attention.choice(q, k, v, visible, **settings)
    if kernel is not None and chosen is kernel.attention_of_keys:
        block = ScoreBlock(visible, *places_of(q, k))
        parts = kernel.compiled_attention_not_kept(q, k, v, block, scoring)
        return exchange.of_rows(*parts).flatten(2)
    out = chosen(q, k, v, visible, **settings)
    return exchange(out.unflatten(2, (q.shape[2], -1))).flatten(2)


def reference_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: KeyVisibility = CAUSAL_KEYS,
    *,
    keep: KeepMask | None = None,
    scoring: Scoring = PLAIN,
    positions: range | None = None,
) -> torch.Tensor:
    """`attention` in elementary operations, on any device; the softmax in fp32.

    positions: of the queries among the keys; the last ones unless given. A causal pattern needs the last ones.
    """
    (sq, b, n, d), (sk, _, g, _) = q.shape, k.shape
    last, all_keys = places_of(q, k)
    places = (last if positions is None else positions), all_keys
    mask = visible.hidden_besides_later(*places, q.device)
    queries = q.permute(1, 2, 0, 3).reshape(b, g, n // g, sq, d)
    keys, values = (
        t.permute(1, 2, 0, 3).unsqueeze(2) for t in (k, v)
    )  # [b, g, 1, sk, d]
    scores = (queries * scoring.scale_of(d)) @ keys.transpose(
        -1, -2
    )  # [b, g, n/g, sq, sk]
    scores = scoring.capped(scores.reshape(b, n, sq, sk))
    if scoring.alibi is not None:
        scores = (scores + scoring.alibi.bias(*places)).to(scores.dtype)
    p = masked_softmax(scores, mask, visible.pattern.causal, 1.0, keep, scoring.sink)
    out = p.reshape(b, g, n // g, sq, sk) @ values
    return _merge_heads(out.reshape(b, n, sq, v.shape[3]))


class _PlannedAttention(torch.autograd.Function):
    # On the meta device torch would write attention out, scores and all. This keeps what its fused kernels
    # keep on GPUs, by their documentation: the arguments, a mask as numbers to be added, the output in the
    # memory order [b, s, n, d], and the logarithm of each row's sum in fp32.

    @staticmethod
    def forward(ctx, queries, keys, values, allowed, work):
        report("attention", "torch", work)
        ctx.work = work
        b, n, s, _ = queries.shape
        out = queries.new_empty(b, s, n, values.shape[3]).transpose(1, 2)
        if allowed is not None and allowed.dtype is torch.bool:
            allowed = queries.new_empty(allowed.shape)
        sums = queries.new_empty(queries.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(queries, keys, values, allowed, out, sums)
        return out

    @staticmethod
    def backward(ctx, dout):
        queries, keys, values, *_ = ctx.saved_tensors
        report("attention backward", "torch", ctx.work.times(2))
        return (
            torch.empty_like(queries),
            torch.empty_like(keys),
            torch.empty_like(values),
            None,
            None,
        )


def _merge_heads(out: torch.Tensor) -> torch.Tensor:
    """[b, n, s, d] → [s, b, n * d]; on CPU no copy: fused attention keeps the queries' memory order."""
    return out.permute(2, 0, 1, 3).flatten(2)
