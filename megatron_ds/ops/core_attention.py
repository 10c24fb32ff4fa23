"""Core attention: softmax(q kᵀ / sqrt(d)) v, causal or masked, with grouped keys and values.

Shapes: s positions, b samples, n query heads, g key-value heads (g divides n; query head i reads key-value
head i // (n/g)), d channels. Queries may be fewer than keys: they are then the last ones (generation with a
key-value cache).

Implementations: torch's fused attention; `reference_attention` with dropout, since it needs the
probabilities. On a CPU, cpu/blocked_attention.py for causal attention of medium length, where it is faster,
and fp32 where the processor has no matrix products of the dtype.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F

from .alibi import Alibi
from .cpu.blocked_attention import blocked_attention, worth_blocking
from .cpu.widened_products import is_widened
from .dropout import KeepMask
from .kernel_table import CPU, Operation, random_tensors
from .product import LOW, has_memory
from .softmax import forbidden, masked_softmax


@Operation
def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = True,
              mask: torch.Tensor | None = None, documents: Any = None, keep: KeepMask | None = None,
              scale: float | None = None, alibi: Alibi | None = None) -> torch.Tensor:
    """q [sq, b, n, d], k and v [sk, b, g, d] → [sq, b, n * d].

    mask       bool [b or 1, n or 1, sq, sk], True = may not attend; in addition to the causal mask
    documents  `data.documents.Documents` of the samples, with sq = sk: a query sees its own document only
    keep       dropout of the probabilities, an `ops.dropout.KeepMask`. They are kept for backward, so
               memory grows with sq * sk
    scale      of the scores, 1 / sqrt(d) unless given
    alibi      the scores fall with the distance; its bias [n, sq, sk] is kept for backward
    """
    has_others = keep is not None or mask is not None or alibi is not None
    if documents is not None and (has_others or not causal):
        mask, documents = documents.foreign if mask is None else mask | documents.foreign, None
    if keep is not None:
        return reference_attention(q, k, v, causal=causal, mask=mask, keep=keep, scale=scale, alibi=alibi)
    sq, sk = q.shape[0], k.shape[0]
    queries, keys, values = (t.permute(1, 2, 0, 3) for t in (q, k, v))          # [b, n or g, s, d], views
    plain_causal = causal and mask is None and documents is None and sq == sk and alibi is None
    allowed = None if documents is None else documents.bias(q.dtype)    # added to the scores; None: all
    if documents is None and not plain_causal:
        hidden = forbidden(sq, sk, causal, mask, q.device)
        allowed = None if hidden is None else ~hidden
        if alibi is not None:
            bias = alibi.bias(range(sk - sq, sk), range(sk)).to(q.dtype)
            allowed = bias if hidden is None else bias.masked_fill(hidden, -math.inf)
    if q.is_meta:
        return _merge_heads(_PlannedAttention.apply(queries, keys, values, allowed))
    out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=allowed, is_causal=plain_causal,
                                         scale=scale,                                         # [b, n, sq, d]
                                         enable_gqa=queries.shape[1] != keys.shape[1])
    return _merge_heads(out)


@attention.example
def _attention_example(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> tuple:
    return tuple(random_tensors(dtype, device, (rows, 2, 4, width), *[(rows, 2, 2, width)] * 2))


def _suits_blocks(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = True,
                  mask: torch.Tensor | None = None, keep: KeepMask | None = None,
                  alibi: Alibi | None = None, **_: Any) -> bool:
    is_whole = alibi is None or alibi.places is None
    return causal and mask is None and keep is None and is_whole and worth_blocking(q, k)


@attention.implementation("blocked", devices=CPU, suits=_suits_blocks)
def _blocked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = True, mask: None = None,
             documents: Any = None, keep: None = None, scale: float | None = None,
             alibi: Alibi | None = None) -> torch.Tensor:
    whole = documents if has_memory(q) else None    # a plan counts what one document keeps: the most
    slopes = None if alibi is None else alibi.slopes
    return blocked_attention(q, k, v, scale or 1 / math.sqrt(q.shape[-1]), whole, slopes)


@attention.implementation("fp32", devices=CPU, dtypes=LOW, suits=lambda q, *_, **__: is_widened(q))
def _in_fp32(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **settings: Any) -> torch.Tensor:
    return attention(q.float(), k.float(), v.float(), **settings).to(q.dtype)


def reference_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = True,
                        mask: torch.Tensor | None = None, keep: KeepMask | None = None,
                        scale: float | None = None, alibi: Alibi | None = None) -> torch.Tensor:
    """`attention` in elementary operations, on any device; the softmax in fp32."""
    (sq, b, n, d), (sk, _, g, _) = q.shape, k.shape
    queries = q.permute(1, 2, 0, 3).reshape(b, g, n // g, sq, d)
    keys, values = (t.permute(1, 2, 0, 3).unsqueeze(2) for t in (k, v))         # [b, g, 1, sk, d]
    scores = (queries * (scale or 1 / math.sqrt(d))) @ keys.transpose(-1, -2)   # [b, g, n/g, sq, sk]
    scores = scores.reshape(b, n, sq, sk)
    if alibi is not None:
        scores = (scores + alibi.bias(range(sk - sq, sk), range(sk))).to(scores.dtype)
    p = masked_softmax(scores, mask, causal, 1.0, keep)
    out = p.reshape(b, g, n // g, sq, sk) @ values
    return _merge_heads(out.reshape(b, n, sq, d))


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
        return torch.empty_like(queries), torch.empty_like(keys), torch.empty_like(values), None


def _merge_heads(out: torch.Tensor) -> torch.Tensor:
    """[b, n, s, d] → [s, b, n * d]; on CPU no copy: fused attention keeps the queries' memory order."""
    return out.permute(2, 0, 1, 3).flatten(2)
