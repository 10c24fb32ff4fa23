"""Tensors of gated delta nets and of Mamba-2 in Hugging Face folders: their names and the packings.

A group of our rows has all that the heads need which share keys:

    in_proj         z  channels  gates      for each group
    conv1d          channels                for each group
    channels        q, k, v of a gated delta net; x, B, C of Mamba-2
    gates           b, a of a gated delta net; dt of Mamba-2
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

import torch

from ....config.options.model import ModelConfig
from ..family import Row
from ..packings import EXPERTS, GATE_UP, QKV_SPLIT, SAME, Packing, Parts
from .rows import LAYER, LLAMA_ROWS, QWEN_MOE_ROWS, WORDS

GroupSizes = tuple[int, tuple[int, ...]]
"""(groups, rows of each part of a group)"""
Sizes = Callable[[ModelConfig], GroupSizes]


def by_group(parts: Parts, groups: int) -> torch.Tensor:
    """Parts, each [groups × its rows, ..] → for each group the rows of all parts."""
    of_groups = [part.unflatten(0, (groups, -1)) for part in parts]
    joined = torch.cat(of_groups, 1)
    return joined.flatten(0, 1)


def by_part(
    rows: torch.Tensor,
    groups: int,
    sizes: Sequence[int],
) -> list[torch.Tensor]:
    """Return the parts that `by_group` joins."""
    of_groups = rows.unflatten(0, (groups, -1))
    parts = of_groups.split(list(sizes), 1)
    return [part.flatten(0, 1) for part in parts]


# ---- Gated delta nets.


def _delta(model: ModelConfig) -> GroupSizes:
    """Return the groups, and the rows z, q, k, v, b, a of each."""
    groups = model.linear_num_key_heads
    heads = model.linear_num_value_heads // groups
    values = heads * model.linear_value_head_dim
    keys = model.linear_key_head_dim
    return groups, (values, keys, keys, values, heads, heads)


def _from_qkvz_ba(parts: Parts, model: ModelConfig) -> torch.Tensor:
    """Rows q, k, v, z of each group, and b, a of each → ours."""
    groups, (z, q, k, v, b, a) = _delta(model)
    *channels, gate = by_part(parts[0], groups, (q, k, v, z))
    numbers = by_part(parts[1], groups, (b, a))
    return by_group((gate, *channels, *numbers), groups)


def _to_qkvz_ba(rows: torch.Tensor, model: ModelConfig) -> list[torch.Tensor]:
    groups, sizes = _delta(model)
    z, q, k, v, b, a = by_part(rows, groups, sizes)
    return [
        by_group((q, k, v, z), groups),
        by_group((b, a), groups),
    ]


def _from_parts(parts: Parts, model: ModelConfig) -> torch.Tensor:
    """Rows q, k, v of all groups, and z, b, a of all groups → ours."""
    groups, (_, q, k, v, _, _) = _delta(model)
    joined, gate, b, a = parts
    channels = joined.split([groups * rows for rows in (q, k, v)])
    return by_group((gate, *channels, b, a), groups)


def _to_parts(rows: torch.Tensor, model: ModelConfig) -> list[torch.Tensor]:
    groups, sizes = _delta(model)
    gate, *channels, b, a = by_part(rows, groups, sizes)
    return [torch.cat(channels), gate, b, a]


def _from_six(parts: Parts, model: ModelConfig) -> torch.Tensor:
    """Rows of q, k, v, z, b and a, a tensor each → ours."""
    q, k, v, z, b, a = parts
    return by_group((z, q, k, v, b, a), _delta(model)[0])


def _to_six(rows: torch.Tensor, model: ModelConfig) -> list[torch.Tensor]:
    groups, sizes = _delta(model)
    z, q, k, v, b, a = by_part(rows, groups, sizes)
    return [q, k, v, z, b, a]


def _from_three(parts: Parts, model: ModelConfig) -> torch.Tensor:
    """Taps [channels, 1, taps] of q, k and v, in three tensors → ours."""
    return _parts_first(_delta_channels, [torch.cat(list(parts)).squeeze(1)], model)


def _to_three(rows: torch.Tensor, model: ModelConfig) -> list[torch.Tensor]:
    groups, sizes = _delta_channels(model)
    return [part.unsqueeze(1) for part in by_part(rows, groups, sizes)]


def _delta_channels(model: ModelConfig) -> GroupSizes:
    groups, sizes = _delta(model)
    return groups, sizes[1:4]


# ---- Mamba-2.


def _mamba(model: ModelConfig) -> GroupSizes:
    """Return the groups, and the rows z, x, B, C, dt of each."""
    groups = model.mamba_num_groups
    heads = model.mamba_heads // groups
    values = heads * model.mamba_head_dim
    keys = model.mamba_state_dim
    return groups, (values, values, keys, keys, heads)


def _mamba_channels(model: ModelConfig) -> GroupSizes:
    groups, sizes = _mamba(model)
    return groups, sizes[1:4]


# ---- One tensor of theirs, with all rows of a part before those of the next.


def _parts_first(sizes: Sizes, parts: Parts, model: ModelConfig) -> torch.Tensor:
    groups, rows = sizes(model)
    of_parts = [groups * count for count in rows]
    return by_group(parts[0].split(of_parts), groups)


def _groups_first(
    sizes: Sizes,
    rows: torch.Tensor,
    model: ModelConfig,
) -> list[torch.Tensor]:
    groups, of_parts = sizes(model)
    parts = by_part(rows, groups, of_parts)
    return [torch.cat(parts)]


def _conv(sizes: Sizes) -> Packing:
    """Return the packing of the convolution: theirs [channels, 1, taps], or of its bias [channels]."""

    def to_ours(parts: Parts, model: ModelConfig) -> torch.Tensor:
        taps = parts[0]
        if taps.dim() > 1:
            taps = taps.squeeze(1)
        return _parts_first(sizes, [taps], model)

    def to_theirs(rows: torch.Tensor, model: ModelConfig) -> list[torch.Tensor]:
        (taps,) = _groups_first(sizes, rows, model)
        if taps.dim() > 1:
            taps = taps.unsqueeze(1)
        return [taps]

    return Packing("channels by part", to_ours, to_theirs)


DELTA_IN = Packing("q, k, v, z and b, a by group", _from_qkvz_ba, _to_qkvz_ba)
DELTA_PARTS = Packing("q, k, v and z, b, a", _from_parts, _to_parts)
DELTA_SIX = Packing("q, k, v, z, b and a", _from_six, _to_six)
# transformers writes them as three tensors of equal size.
DELTA_TAPS = Packing("taps of q, k and v", _from_three, _to_three, is_joined=True)
DELTA_CONV = _conv(_delta_channels)
MAMBA_IN = Packing(
    "z, x, B, C, dt",
    partial(_parts_first, _mamba),
    partial(_groups_first, _mamba),
)
MAMBA_CONV = _conv(_mamba_channels)


# ---- Attention with a gate: rows q and gate of each head in one tensor.


def _gated_heads(parts: Parts, model: ModelConfig) -> torch.Tensor:
    """Rows q, gate of each head, K and V → our rows q.., k, v, gate.. of each group."""
    pairs, keys, values = parts
    of_heads = pairs.unflatten(0, (model.num_attention_heads, 2, -1))
    queries, gates = (part.flatten(0, 1) for part in of_heads.unbind(1))
    return by_group((queries, keys, values, gates), model.query_groups)


def _ungated_heads(rows: torch.Tensor, model: ModelConfig) -> list[torch.Tensor]:
    heads = model.num_attention_heads
    groups = model.query_groups
    d = model.head_dim
    width = heads // groups * d
    queries, keys, values, gates = by_part(rows, groups, (width, d, d, width))
    of_heads = [part.unflatten(0, (heads, -1)) for part in (queries, gates)]
    pairs = torch.stack(of_heads, 1)
    return [pairs.flatten(0, 2), keys, values]


GATED_QKV = Packing("q with gates, k and v", _gated_heads, _ungated_heads)


# ---- Rows.


def _mixer_rows(theirs: str, projections: Row, conv: Packing) -> tuple[Row, ...]:
    """Return the rows of a mixer. theirs: the name of the module."""
    same = ("norm.weight", "out_proj.{leaf}", "A_log", "dt_bias", "D")
    return (
        projections,
        replace(_same_name("conv1d.{leaf}", theirs), packing=conv),
        *(_same_name(name, theirs) for name in same),
    )


def _same_name(name: str, theirs: str) -> Row:
    """Return the row of a tensor of a mixer that both give the same name."""
    return Row(MIXED + name, f"{theirs}.{name}")


MIXED = LAYER + "self_attention."
DELTA = "model.layers.{i}.linear_attn"


def _qwen_rows(projections: str, packing: Packing) -> tuple[Row, ...]:
    """Return the rows of a model of Qwen. projections: names of the first ones of a gated delta net."""
    names = [f"{DELTA}.in_proj_{name}.weight" for name in projections.split()]
    first = Row(MIXED + "in_proj.weight", " ".join(names), packing)
    gated = (
        replace(row, packing=GATED_QKV) if row.packing is QKV_SPLIT else row
        for row in QWEN_MOE_ROWS
    )
    return (*_mixer_rows(DELTA, first, DELTA_CONV), *gated)


QWEN3_NEXT_ROWS = _qwen_rows("qkvz ba", DELTA_IN)
QWEN3_5_ROWS = _qwen_rows("qkv z b a", DELTA_PARTS)
BLOCK = "model.layers.{i}"
MAMBA_MODULE = f"{BLOCK}.mamba"
MAMBA_ROWS = _mixer_rows(
    MAMBA_MODULE,
    Row(MIXED + "in_proj.weight", f"{MAMBA_MODULE}.in_proj.weight", MAMBA_IN),
    MAMBA_CONV,
)


def _inside(place: str, rows: Iterable[Row]) -> tuple[Row, ...]:
    """Return the rows of a mixer that is one of two in its slot. place: its name there"""
    return tuple(
        replace(row, ours=row.ours.replace(MIXED, f"{MIXED}{place}."))
        for row in rows
        if row.ours.startswith(MIXED)
    )


def _block_row(ours: str, theirs: str, packing: Packing = SAME) -> Row:
    """Return the row of a weight of a whole block. theirs: names, separated by spaces."""
    names = [f"{BLOCK}.{name}.weight" for name in theirs.split()]
    return Row(f"{LAYER}{ours}.weight", " ".join(names), packing)


def _olmo_row(ours: str, theirs: str, packing: Packing = SAME) -> Row:
    """Return the row of a weight of a gated delta net. theirs: names, separated by spaces."""
    names = [f"{DELTA}.{name}" for name in theirs.split()]
    return Row(MIXED + ours, " ".join(names), packing)


OLMO_HYBRID_ROWS = (
    _olmo_row(
        "in_proj.weight",
        " ".join(f"{part}_proj.weight" for part in "qkvgba"),
        DELTA_SIX,
    ),
    _olmo_row(
        "conv1d.weight",
        " ".join(f"{part}_conv1d.weight" for part in "qkv"),
        DELTA_TAPS,
    ),
    _olmo_row("norm.weight", "o_norm.weight"),
    _olmo_row("out_proj.weight", "o_proj.weight"),
    _olmo_row("A_log", "A_log"),
    _olmo_row("dt_bias", "dt_bias"),
    # transformers gives the first norm of a block with attention the name of the second one of the others.
    _block_row("input_layernorm", "attention_layer_norm"),
    _block_row("pre_mlp_layernorm", "feedforward_layer_norm"),
    _block_row("post_self_attn_layernorm", "feedforward_layer_norm"),
    _block_row("post_mlp_layernorm", "post_feedforward_layernorm"),
    *LLAMA_ROWS,
)
OLMO2_ROWS = (
    _block_row("post_self_attn_layernorm", "post_attention_layernorm"),
    _block_row("post_mlp_layernorm", "post_feedforward_layernorm"),
    *LLAMA_ROWS,
)
BAMBA_ROWS = (
    *MAMBA_ROWS,
    Row("decoder.final_layernorm.weight", "model.final_layernorm.weight"),
    _block_row("pre_mlp_layernorm", "pre_ff_layernorm"),
    _block_row(
        "mlp.linear_fc1", "feed_forward.gate_proj feed_forward.up_proj", GATE_UP
    ),
    _block_row("mlp.linear_fc2", "feed_forward.down_proj"),
    *LLAMA_ROWS,
)
FALCON_H1_ROWS = (
    *_inside("mamba", MAMBA_ROWS),
    *_inside("attention", LLAMA_ROWS),
    *BAMBA_ROWS,
)
GRANITE_HYBRID_ROWS = (
    *MAMBA_ROWS,
    *(
        _block_row(ours, theirs)
        for ours, theirs in (
            ("mlp.router", "block_sparse_moe.router.layer"),
            ("mlp.experts.linear_fc1", "block_sparse_moe.input_linear"),
            ("mlp.experts.linear_fc2", "block_sparse_moe.output_linear"),
            ("mlp.shared_experts.linear_fc1", "shared_mlp.input_linear"),
            ("mlp.shared_experts.linear_fc2", "shared_mlp.output_linear"),
            ("mlp.linear_fc1", "shared_mlp.input_linear"),
            ("mlp.linear_fc2", "shared_mlp.output_linear"),
        )
    ),
    *LLAMA_ROWS,
)
HALF = "backbone.layers.{i}"


def _half_row(ours: str, theirs: str) -> Row:
    """Return the row of a tensor of a half block. theirs: names, separated by spaces."""
    names = [f"{HALF}.{name}" for name in theirs.split()]
    return Row(LAYER + ours, " ".join(names))


UNGATED = (("linear_fc1", "up_proj"), ("linear_fc2", "down_proj"))
NEMOTRON_H_ROWS = (
    Row(WORDS, "backbone.embeddings.weight"),
    Row("output_layer.weight", "lm_head.weight"),
    Row("decoder.final_layernorm.{leaf}", "backbone.norm_f.{leaf}"),
    _half_row("input_layernorm.{leaf}", "norm.{leaf}"),
    _half_row("pre_mlp_layernorm.{leaf}", "norm.{leaf}"),
    *_mixer_rows(
        f"{HALF}.mixer",
        replace(
            _half_row("self_attention.in_proj.{leaf}", "mixer.in_proj.{leaf}"),
            packing=MAMBA_IN,
        ),
        MAMBA_CONV,
    ),
    replace(
        _half_row(
            "self_attention.linear_qkv.{leaf}",
            "mixer.q_proj.{leaf} mixer.k_proj.{leaf} mixer.v_proj.{leaf}",
        ),
        packing=QKV_SPLIT,
    ),
    _half_row("self_attention.linear_proj.{leaf}", "mixer.o_proj.{leaf}"),
    _half_row("mlp.linear_fc1.{leaf}", "mixer.up_proj.{leaf}"),
    _half_row("mlp.linear_fc2.{leaf}", "mixer.down_proj.{leaf}"),
    _half_row("mlp.router.weight", "mixer.gate.weight"),
    _half_row("mlp.router.expert_bias", "mixer.gate.e_score_correction_bias"),
    *(
        replace(
            _half_row(
                f"mlp.experts.{ours}.weight", f"mixer.experts.{{e}}.{name}.weight"
            ),
            packing=EXPERTS,
        )
        for ours, name in UNGATED
    ),
    *(
        _half_row(
            f"mlp.shared_experts.{ours}.weight", f"mixer.shared_experts.{name}.weight"
        )
        for ours, name in UNGATED
    ),
)
