"""Tensors of gated delta nets and of Mamba-2 in Hugging Face folders: their names and the packings.

A group of our rows has all that the heads need which share keys:

    in_proj         z  channels  gates      for each group
    conv1d          channels                for each group
    channels        q, k, v of a gated delta net; x, B, C of Mamba-2
    gates           b, a of a gated delta net; dt of Mamba-2
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from ....config.options.model import ModelConfig
from ..family import Row
from ..packings import QKV_SPLIT, Packing, Parts
from .rows import LAYER, QWEN_MOE_ROWS, WORDS

Sizes = Callable[[ModelConfig], tuple[int, tuple[int, ...]]]
"""(model) → (groups, rows of each part of a group)"""


def by_group(parts: Parts, groups: int) -> torch.Tensor:
    """Parts, each [groups × its rows, ..] → for each group the rows of all parts."""
    return torch.cat([part.unflatten(0, (groups, -1)) for part in parts], 1).flatten(
        0, 1
    )


def by_part(
    rows: torch.Tensor, groups: int, sizes: Sequence[int]
) -> list[torch.Tensor]:
    """Return the parts that `by_group` joins."""
    of_groups = rows.unflatten(0, (groups, -1)).split(list(sizes), 1)
    return [part.flatten(0, 1) for part in of_groups]


# ---- Gated delta nets.


def _delta(model: ModelConfig) -> tuple[int, tuple[int, ...]]:
    """Return the groups, and the rows z, q, k, v, b, a of each."""
    groups = model.linear_num_key_heads
    heads = model.linear_num_value_heads // groups
    values = heads * model.linear_value_head_dim
    keys = model.linear_key_head_dim
    return groups, (values, keys, keys, values, heads, heads)


def _from_qkvz_ba(parts: Parts, model: ModelConfig) -> torch.Tensor:
    """Rows q, k, v, z of each group, and b, a of each → ours."""
    groups, (z, q, k, v, b, a) = _delta(model)
    *qkv, gate = by_part(parts[0], groups, (q, k, v, z))
    return by_group((gate, *qkv, *by_part(parts[1], groups, (b, a))), groups)


def _to_qkvz_ba(rows: torch.Tensor, model: ModelConfig) -> list[torch.Tensor]:
    groups, sizes = _delta(model)
    z, q, k, v, b, a = by_part(rows, groups, sizes)
    return [by_group((q, k, v, z), groups), by_group((b, a), groups)]


def _delta_channels(model: ModelConfig) -> tuple[int, tuple[int, ...]]:
    groups, sizes = _delta(model)
    return groups, sizes[1:4]


# ---- Mamba-2.


def _mamba(model: ModelConfig) -> tuple[int, tuple[int, ...]]:
    """Return the groups, and the rows z, x, B, C, dt of each."""
    groups = model.mamba_num_groups
    heads = model.mamba_heads // groups
    values = heads * model.mamba_head_dim
    keys = model.mamba_state_dim
    return groups, (values, values, keys, keys, heads)


def _mamba_channels(model: ModelConfig) -> tuple[int, tuple[int, ...]]:
    groups, sizes = _mamba(model)
    return groups, sizes[1:4]


# ---- One tensor of theirs, with all rows of a part before those of the next.


def _parts_first(sizes: Sizes, parts: Parts, model: ModelConfig) -> torch.Tensor:
    groups, rows = sizes(model)
    return by_group(parts[0].split([groups * n for n in rows]), groups)


def _groups_first(
    sizes: Sizes, rows: torch.Tensor, model: ModelConfig
) -> list[torch.Tensor]:
    return [torch.cat(by_part(rows, *sizes(model)))]


def _conv(sizes: Sizes) -> Packing:
    """Return the packing of the convolution: theirs [channels, 1, taps], or of its bias [channels]."""

    def to_ours(parts: Parts, model: ModelConfig) -> torch.Tensor:
        taps = parts[0]
        return _parts_first(sizes, [taps.squeeze(1) if taps.dim() > 1 else taps], model)

    def to_theirs(rows: torch.Tensor, model: ModelConfig) -> list[torch.Tensor]:
        (taps,) = _groups_first(sizes, rows, model)
        return [taps.unsqueeze(1) if taps.dim() > 1 else taps]

    return Packing("channels by part", to_ours, to_theirs)


DELTA_IN = Packing("q, k, v, z and b, a by group", _from_qkvz_ba, _to_qkvz_ba)
DELTA_CONV = _conv(_delta_channels)
MAMBA_IN = Packing(
    "z, x, B, C, dt", partial(_parts_first, _mamba), partial(_groups_first, _mamba)
)
MAMBA_CONV = _conv(_mamba_channels)


# ---- Attention with a gate: rows q and gate of each head in one tensor.


def _gated_heads(parts: Parts, model: ModelConfig) -> torch.Tensor:
    """Rows q, gate of each head, K and V → our rows q.., k, v, gate.. of each group."""
    pairs = parts[0].unflatten(0, (model.num_attention_heads, 2, -1))
    queries, gates = (pair.flatten(0, 1) for pair in pairs.unbind(1))
    return by_group((queries, *parts[1:], gates), model.query_groups)


def _ungated_heads(rows: torch.Tensor, model: ModelConfig) -> list[torch.Tensor]:
    d = model.head_dim
    queries = model.num_attention_heads // model.query_groups * d
    sizes = (queries, d, d, queries)
    q, k, v, gates = by_part(rows, model.query_groups, sizes)
    pairs = (part.unflatten(0, (model.num_attention_heads, -1)) for part in (q, gates))
    return [torch.stack(list(pairs), 1).flatten(0, 2), k, v]


GATED_QKV = Packing("q with gates, k and v", _gated_heads, _ungated_heads)


# ---- Rows.


def _mixer_rows(theirs: str, projections: Row, conv: Packing) -> tuple[Row, ...]:
    """Return the rows of a mixer. theirs: the name of the module."""
    ours = f"{LAYER}self_attention"
    return (
        projections,
        Row(f"{ours}.conv1d.{{leaf}}", f"{theirs}.conv1d.{{leaf}}", conv),
        Row(f"{ours}.norm.weight", f"{theirs}.norm.weight"),
        Row(f"{ours}.out_proj.{{leaf}}", f"{theirs}.out_proj.{{leaf}}"),
        *(
            Row(f"{ours}.{name}", f"{theirs}.{name}")
            for name in ("A_log", "dt_bias", "D")
        ),
    )


DELTA = "model.layers.{i}.linear_attn"


def _qwen_rows(projections: str, packing: Packing) -> tuple[Row, ...]:
    """Return the rows of a model of Qwen. projections: names of the first ones of a gated delta net."""
    names = " ".join(f"{DELTA}.in_proj_{name}.weight" for name in projections.split())
    first = Row(f"{LAYER}self_attention.in_proj.weight", names, packing)
    gated = (
        replace(row, packing=GATED_QKV) if row.packing is QKV_SPLIT else row
        for row in QWEN_MOE_ROWS
    )
    return (*_mixer_rows(DELTA, first, DELTA_CONV), *gated)


QWEN3_NEXT_ROWS = _qwen_rows("qkvz ba", DELTA_IN)
HALF = "backbone.layers.{i}"
MIXER = f"{HALF}.mixer"
NEMOTRON_H_ROWS = (
    Row(WORDS, "backbone.embeddings.weight"),
    Row("output_layer.weight", "lm_head.weight"),
    Row("decoder.final_layernorm.{leaf}", "backbone.norm_f.{leaf}"),
    Row(f"{LAYER}input_layernorm.{{leaf}}", f"{HALF}.norm.{{leaf}}"),
    Row(f"{LAYER}pre_mlp_layernorm.{{leaf}}", f"{HALF}.norm.{{leaf}}"),
    *_mixer_rows(
        MIXER,
        Row(
            f"{LAYER}self_attention.in_proj.{{leaf}}",
            f"{MIXER}.in_proj.{{leaf}}",
            MAMBA_IN,
        ),
        MAMBA_CONV,
    ),
    Row(
        f"{LAYER}self_attention.linear_qkv.{{leaf}}",
        " ".join(f"{MIXER}.{part}_proj.{{leaf}}" for part in "qkv"),
        QKV_SPLIT,
    ),
    Row(f"{LAYER}self_attention.linear_proj.{{leaf}}", f"{MIXER}.o_proj.{{leaf}}"),
    Row(f"{LAYER}mlp.linear_fc1.{{leaf}}", f"{MIXER}.up_proj.{{leaf}}"),
    Row(f"{LAYER}mlp.linear_fc2.{{leaf}}", f"{MIXER}.down_proj.{{leaf}}"),
)
