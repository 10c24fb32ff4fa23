"""Attention by torch's FlexAttention (Dong et al. 2024, arXiv:2412.05496), a Triton kernel that computes only
the tiles of scores that a pattern shows.

    pattern, documents, padding → VisibleBlocks → BlockMask      tiles: skipped, whole, or with a mask
                                → mask_mod                     the mask within a tile, from positions
    cap, then ALiBi             → score_mod
    sink                        → the result times exp(lse) / (exp(sink) + exp(lse)), lse = log Σ exp(s)

A `BlockMask` is made once for each pattern and length, and once for each micro-batch with documents or
padding, for all layers. The host does not wait while it is made.

`flex_attention` is compiled once for all layers: a mask_mod or score_mod is a closure over tensors, and torch
compiles closures of the same code once. Another length is compiled once more, for all lengths from then on.
It has not run on a GPU yet; the first call of a process compares it with attention written out.
"""

import logging
from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from ....host.device_copies import on_device
from ....ops.attention_pattern import AttentionPattern
from ....ops.key_visibility import KeyVisibility
from ....ops.scoring import Scoring
from ....ops.visible_blocks import (
    Parts,
    VisibleBlocks,
    of_ids,
    of_padding,
    visible_blocks,
)
from .compile_phase import mark_compilations

logger = logging.getLogger(__name__)

TILE = 128  # queries, and keys
CHANNELS = range(
    16, 257
)  # of heads. FlexAttention refuses fewer; more exceed the shared memory

# (sample, head, query, key): scalar tensors → whether the query sees the key
MaskMod = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor
]


@lru_cache
def reason_against() -> str:
    """Return why this machine cannot run it; "" if it can. Logged once."""
    reason = "" if find_spec("triton") else "Triton is not installed"
    if reason:
        logger.info(
            "FlexAttention is not used: %s. On GPUs, attention with windows, layouts, documents, "
            "sinks, ALiBi or caps computes all scores.",
            reason,
        )
    return reason


def fits(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str:
    """Return why it does not take these arguments; "" if it does."""
    if not q.dtype == k.dtype == v.dtype:
        return f"dtypes {q.dtype}, {k.dtype} and {v.dtype} differ"
    if q.shape[-1] not in CHANNELS or v.shape[-1] != q.shape[-1]:
        return f"heads of {q.shape[-1]} and {v.shape[-1]} channels, not of {CHANNELS[0]} to {CHANNELS[-1]}"
    return ""


def flex_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: KeyVisibility,
    scoring: Scoring,
    run: Callable[..., Any] | None = None,
) -> torch.Tensor:
    """q [s, b, n, d], k and v [s, b, g, d] → [s, b, n * d].

    visible: which keys a query sees; its mask is bool [b or 1, 1, 1, s], keys that no query sees
    run: `compiled` unless given
    """
    queries, keys, values = (
        t.permute(1, 2, 0, 3) for t in (q, k, v)
    )  # [b, n or g, s, d], views
    if q.is_meta:
        out, lse = _Planned.apply(queries, keys, values)
    else:
        mask = block_mask(visible, q.shape[0], q.device)
        out, lse = _attend(run or compiled(), queries, keys, values, mask, scoring)
    if scoring.sink is not None:
        # The product is computed in fp32, but only `out` itself is kept for it.
        out = (out * torch.sigmoid(lse - scoring.sink.float()[:, None])[..., None]).to(
            out.dtype
        )
    return out.permute(2, 0, 1, 3).flatten(
        2
    )  # a view: the output has the queries' memory order


def compiled_apart(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: KeyVisibility,
    *,
    scoring: Scoring,
) -> torch.Tensor:
    """`flex_attention` for a check before a run: compiled by itself, because torch compiles the second length
    of a function for all lengths, which is slower, and that of the run should be the first."""
    return flex_attention(q, k, v, visible, scoring, run=_compiled_for_check())


def _attend(
    run: Callable[..., Any],
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: Any,
    scoring: Scoring,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(output [b, n, s, d], lse fp32 [b, n, s] where the sink needs it)"""
    # Imported here: it takes a while, and runs without patterns should not wait for it.
    from torch.nn.attention.flex_attention import AuxRequest

    arguments = dict(
        score_mod=_score_mod(scoring),
        block_mask=mask,
        scale=scoring.scale_of(queries.shape[-1]),
        enable_gqa=queries.shape[1] != keys.shape[1],
    )
    if scoring.sink is None:
        return run(queries, keys, values, **arguments), None
    out, aux = run(queries, keys, values, return_aux=AuxRequest(lse=True), **arguments)
    return out, aux.lse


@lru_cache
def compiled() -> Callable[..., Any]:
    """torch's flex_attention, compiled; one for the process, so that layers share what was compiled."""
    from torch.nn.attention.flex_attention import flex_attention as of_torch

    mark_compilations()
    return torch.compile(of_torch, fullgraph=True)


@lru_cache
def _compiled_for_check() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention as of_torch

    def checked(
        *arguments: Any, **named: Any
    ) -> Any:  # torch counts lengths by function
        return of_torch(*arguments, **named)

    mark_compilations()
    return torch.compile(checked, fullgraph=True)


# ------------------------------------------------------------------------------------------ masks
def block_mask(visible: KeyVisibility, positions: int, device: torch.device) -> Any:
    """torch's BlockMask [b or 1, n or 1, positions, positions]; None if nothing is hidden."""
    ids = None if visible.documents is None else visible.documents.ids
    if ids is None and visible.mask is None:
        return _of_pattern(visible.pattern, positions, device)
    return _of_batch(visible.pattern, ids, visible.mask)


@lru_cache(maxsize=1024)
def _of_pattern(pattern: AttentionPattern, positions: int, device: torch.device) -> Any:
    mods = _pattern_mods(pattern, device)
    return (
        _made(_pattern_tiles(pattern, positions, device), mods, positions)
        if mods
        else None
    )


# As documents' squares (`batch.documents`), only the last ones are kept. Tensors are keys by identity.
@lru_cache(maxsize=4)
def _of_batch(
    pattern: AttentionPattern, ids: torch.Tensor | None, padding: torch.Tensor | None
) -> Any:
    of_batch = padding if ids is None else ids
    assert of_batch is not None, "there are documents or padding"
    device = of_batch.device
    positions = of_batch.shape[-1]
    tiles = _pattern_tiles(pattern, positions, device)
    mods = list(_pattern_mods(pattern, device))
    if ids is not None:
        tiles &= of_ids(ids, TILE)
        mods.append(_of_document(ids))
    if padding is not None:
        tiles &= of_padding(padding[:, 0, 0], TILE)
        mods.append(_of_padding(padding[:, 0, 0]))
    return _made(tiles, mods, positions)


@lru_cache(maxsize=1024)
def _pattern_tiles(
    pattern: AttentionPattern, positions: int, device: torch.device
) -> VisibleBlocks[torch.Tensor]:
    tiles = tiles_of(pattern, positions)
    with torch.inference_mode(False):  # else training could not keep them for backward
        return VisibleBlocks(
            *(
                on_device(torch.tensor(t), device)[None]
                for t in (tiles.seen, tiles.whole)
            )
        )


def tiles_of(pattern: AttentionPattern, positions: int) -> VisibleBlocks[np.ndarray]:
    """Arrays [n or 1, tiles, tiles] of whole sequences. A last tile that is shorter is never whole."""
    parts = Parts.of(range(positions), TILE)
    tiles = visible_blocks(pattern, parts, parts)
    is_full = parts.stops - parts.starts == TILE
    return VisibleBlocks(tiles.seen, tiles.whole & is_full & is_full[:, None])


def _made(
    tiles: VisibleBlocks[torch.Tensor], mods: list[MaskMod], positions: int
) -> Any:
    from torch.nn.attention.flex_attention import BlockMask, and_masks

    with torch.inference_mode(False):
        lists = (
            *_listed(tiles.seen & ~tiles.whole),
            *_listed(tiles.seen & tiles.whole),
        )
        return BlockMask.from_kv_blocks(
            *lists,
            BLOCK_SIZE=TILE,
            mask_mod=and_masks(*mods),
            seq_lengths=(positions, positions),
        )


def _listed(tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(how many tiles of each row are true, their columns before all others), int32."""
    # Results of these operations have the memory order of `tiles`; the kernels read them as contiguous.
    tiles = tiles.contiguous()
    order = tiles.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return tiles.sum(-1, dtype=torch.int32), order.to(torch.int32)


@lru_cache(maxsize=1024)
def _pattern_mods(pattern: AttentionPattern, device: torch.device) -> list[MaskMod]:
    mods = []
    if pattern.after is not None:
        mods.append(_not_after(pattern.after))
    if pattern.left is not None:
        mods.append(_not_before(pattern.left))
    if pattern.layout is not None:
        with torch.inference_mode(False):
            seen = on_device(torch.tensor(pattern.layout.seen), device)
        mods.append(_of_layout(seen, pattern.layout.block))
    return mods


def _not_after(after: int) -> MaskMod:
    return lambda sample, head, query, key: key - query <= after


def _not_before(left: int) -> MaskMod:
    return lambda sample, head, query, key: query - key <= left


def _of_layout(seen: torch.Tensor, block: int) -> MaskMod:
    if len(seen) == 1:
        return lambda sample, head, query, key: seen[0, query // block, key // block]
    return lambda sample, head, query, key: seen[head, query // block, key // block]


def _of_document(ids: torch.Tensor) -> MaskMod:
    return lambda sample, head, query, key: ids[sample, query] == ids[sample, key]


def _of_padding(hidden: torch.Tensor) -> MaskMod:
    if len(hidden) == 1:
        return lambda sample, head, query, key: ~hidden[0, key]
    return lambda sample, head, query, key: ~hidden[sample, key]


def _score_mod(scoring: Scoring) -> Callable[..., torch.Tensor] | None:
    """Return what is computed of each score; None: nothing."""
    bias = None
    if scoring.alibi is not None:
        bias = _alibi(scoring.alibi.slopes)
    if scoring.cap is None:
        return bias
    return _capped(scoring.cap, bias or _as_it_is)


def _alibi(slopes: torch.Tensor) -> Callable[..., torch.Tensor]:
    return lambda score, sample, head, query, key: (
        score - slopes[head] * (query - key).abs()
    )


def _capped(
    cap: float, then: Callable[..., torch.Tensor]
) -> Callable[..., torch.Tensor]:
    return lambda score, *place: then(cap * torch.tanh(score / cap), *place)


def _as_it_is(score: torch.Tensor, *place: torch.Tensor) -> torch.Tensor:
    return score


# ------------------------------------------------------------------------------------------ plans
class _Planned(torch.autograd.Function):
    # What the compiled kernel keeps for backward: the arguments, the output in the queries' memory order, and
    # fp32 [b, n, s]. The masks are kept once for all layers.

    @staticmethod
    def forward(ctx, queries, keys, values):
        b, n, s, d = queries.shape
        out = queries.new_empty(s, b, n, d).permute(1, 2, 0, 3)
        lse = queries.new_empty(b, n, s, dtype=torch.float32)
        ctx.save_for_backward(queries, keys, values, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        return tuple(torch.empty_like(t) for t in ctx.saved_tensors[:3])
