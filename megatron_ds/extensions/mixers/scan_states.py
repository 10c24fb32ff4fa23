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
    kept: list = []
    out = chunks.scanned(masks, lambda *parts: kept.extend(parts))
    fade, since_begin, values, earlier = kept
    at = ends // chunk
    within = ends % chunk
    # The chunk of each end, and of it the row of the end: [1, g, n/g, texts, C, ..].
    from_tokens = fade[..., at, within, :].unsqueeze(-1)
    keys = chunks.k.index_select(CHUNKS, at) * from_tokens
    added = keys.mT @ torch.stack(values, CHUNKS).index_select(CHUNKS, at)
    first = values[0]
    none = first.new_zeros((*first.shape[:CHUNKS], k.shape[-1], v.shape[-1]))
    before = torch.stack([none, *earlier], CHUNKS)
    from_state = since_begin[..., at, within, :].unsqueeze(-1)
    states = added + from_state * before.index_select(CHUNKS, at)
    # [1, g, n/g, texts, dk, dv] → [texts, n, dk, dv]
    of_heads = states[0].flatten(0, 1)
    return out.to(v.dtype), of_heads.transpose(0, 1)


def scan_step(inputs: Inputs, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return o [texts, n, dv] in the dtype of v of a token of each text, and the states after it.

    inputs  q, k [texts, g, dk], v [texts, n, dv], decay and beta [texts, n], as in `linear_scan`
    state   fp32 at least, [texts, n, dk, dv]
    """
    q, k, v, decay, beta = inputs
    each = v.shape[1] // q.shape[1]
    of_heads = lambda x: x.to(state.dtype).repeat_interleave(each, 1).unsqueeze(-1)
    keys = of_heads(k)
    value = v.to(state.dtype).unsqueeze(-2)
    state = state * decay.to(state.dtype).exp()[..., None, None]
    if beta is not None:
        error = value - keys.mT @ state
        value = beta.to(state.dtype)[..., None, None] * error
    state = state + keys * value
    out = of_heads(q).mT @ state
    return out.squeeze(-2).to(v.dtype), state
