"""The states of `linear_scan`: after given tokens of texts that are read, and from one token of a text to the next.

With the letters of `linear_scan.py`, the state after token e of a chunk is, of the tokens of its document,

    S_e = exp(G_e) S + Σ_{j ≤ e} exp(G_e - G_j) k_j v'_jᵀ
"""

from collections.abc import Sequence
from typing import Any

import torch

from .chunk_masks import chunk_masks
from .linear_scan import CHUNK, CHUNKS, ScanChunks

Inputs = Sequence[Any]
"""Tensors, the last of which may be None."""


def scan_with_states(
    inputs: Inputs,
    documents: torch.Tensor | None,
    ends: torch.Tensor,
    chunk: int = CHUNK,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return o [s, 1, n, dv] in the dtype of v, and the states after the tokens `ends`, int64 [texts], of their
    documents: fp32 at least, [texts, n, dk, dv].

    inputs  q, k, v, decay and beta of `linear_scan`, of one sequence; documents, chunk: as there
    """
    q, k, v, decay, beta = inputs
    chunks = ScanChunks(q, k, v, decay, beta, chunk)
    masks = chunk_masks(documents, chunk, chunks.dtype, q.device)
    kept: list[Any] = []
    out = chunks.scanned(masks, lambda *parts: kept.extend(parts))
    fade, since_begin, values, earlier = kept
    # The chunk of each end, and its place there: dimensions [1, g, n/g, texts, C, ..].
    at = ends // chunk
    within = ends % chunk
    of_ends = lambda x: x.index_select(CHUNKS, at)
    # What the tokens of the chunk add.
    from_tokens = fade[..., at, within, :]
    keys = of_ends(chunks.k) * from_tokens.unsqueeze(-1)
    news = torch.stack(values, CHUNKS)
    added = keys.mT @ of_ends(news)
    # What is left of the state before the chunk, which is 0 before the first.
    state = values[0].new_zeros(
        *values[0].shape[:CHUNKS],
        k.shape[-1],
        v.shape[-1],
    )
    before = torch.stack([state, *earlier], CHUNKS)
    from_state = since_begin[..., at, within, :]
    states = added + from_state.unsqueeze(-1) * of_ends(before)
    # [1, g, n/g, texts, dk, dv] → [texts, n, dk, dv]
    of_heads = states[0].flatten(0, 1)
    return out.to(v.dtype), of_heads.transpose(0, 1)


def scan_step(
    inputs: Inputs,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return o [texts, n, dv] in the dtype of v of a token of each text, and the states after it.

    inputs  q, k [texts, g, dk], v [texts, n, dv], decay and beta [texts, n], as in `linear_scan`
    state   fp32 at least, [texts, n, dk, dv]
    """
    q, k, v, decay, beta = inputs
    each = v.shape[1] // q.shape[1]
    keys = _of_heads(k, each, state.dtype)
    queries = _of_heads(q, each, state.dtype)
    value = v.to(state.dtype).unsqueeze(-2)
    # The old state fades, and with the delta rule the value is the error that it makes.
    factor = decay.to(state.dtype).exp()
    state = state * factor[..., None, None]
    if beta is not None:
        rate = beta.to(state.dtype)
        error = value - keys.mT @ state
        value = rate[..., None, None] * error
    state = state + keys * value
    out = queries.mT @ state
    return out.squeeze(-2).to(v.dtype), state


def _of_heads(
    x: torch.Tensor,
    each: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """x [texts, g, d] → columns of the heads, [texts, n, d, 1]."""
    heads = x.to(dtype).repeat_interleave(each, 1)
    return heads.unsqueeze(-1)
