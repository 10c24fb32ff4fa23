"""Names in Megatron-LM's checkpoints → ours, which are those of megatron-core's local layers.

Three spellings of the same tensors exist: the models before megatron-core (nested in `language_model`), and
megatron-core's layers, local ones or those of TransformerEngine, which join a norm with the linear layer
after it. A file may also have one tensor for each expert or for each half of a gated layer; `Part` is the
place of such a tensor in ours.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..files.foreign_pickle import fields_of
from ..files.stored_tensor import StoredTensor

VOCABULARY = (
    "embedding.word_embeddings.weight",
    "output_layer.weight",
    "output_layer.bias",
)
EMBEDDING, HEAD = VOCABULARY[:2]
HEAD_COPY = "word_embeddings_for_head.weight"

# Applied in order to a name; each replaces what it matches.
_RULES = tuple(
    (re.compile(pattern), new)
    for pattern, new in (
        (r"^language_model\.", ""),
        (r"^transformer\.", "encoder."),
        (r"\.attention\.", ".self_attention."),
        (r"\.self_attention\.query_key_value\.", ".self_attention.linear_qkv."),
        (r"\.self_attention\.dense\.", ".self_attention.linear_proj."),
        (r"\.input_norm\.", ".input_layernorm."),
        (r"\.post_attention_(layer)?norm\.", ".pre_mlp_layernorm."),
        (r"\.mlp\.dense_h_to_4h\.", ".mlp.linear_fc1."),
        (r"\.mlp\.dense_4h_to_h\.", ".mlp.linear_fc2."),
        (r"^(encoder|decoder)\.final_norm\.", r"\1.final_layernorm."),
        (r"^lm_head\.layernorm\.", "lm_head.layer_norm."),
        (r"^lm_head\.bias$", "output_layer.bias"),
        (
            r"\.self_attention\.linear_qkv\.layer_norm_(weight|bias)$",
            r".input_layernorm.\1",
        ),
        (
            r"\.self_attention\.linear_(q|kv)_up_proj\.layer_norm_(weight|bias)$",
            r".self_attention.\1_layernorm.\2",
        ),
        (r"\.mlp\.linear_fc1\.layer_norm_(weight|bias)$", r".pre_mlp_layernorm.\1"),
        (r"^(mtp\.layers\.\d+)\.mtp_model_layer\.", r"\1.transformer_layer."),
        (r"\.mlp\.experts\.experts\.", ".mlp.experts."),
    )
)
_EXPERT = re.compile(
    r"(.*\.mlp\.experts)\.(?:local_experts\.)?(\d+)\.(linear_fc[12])\.(weight|bias)"
)
_GROUPED = re.compile(r"(.*\.mlp\.experts\.linear_fc[12]\.(?:weight|bias))(\d+)")
_HALF = re.compile(r"(.*\.linear_fc1\.(?:weight|bias))_([wv])")
_LAYER = re.compile(r"((?:encoder|decoder)\.layers)\.(\d+)\.(.*)")
IGNORED = re.compile(
    r"(.*\.)?(_extra_state(/.*)?|inv_freq|rotary_pos_emb\..*|local_tokens_per_expert)$"
    r"|.*\.attention\.(bias|masked_bias)$"
)


@dataclass(frozen=True)
class TensorPart:
    """Place of a stored tensor in ours.

    name    ours
    expert  number of the expert that it belongs to; None for the whole tensor
    half    0 for the gate, 1 for the other half of a gated layer; None for both
    """

    name: str
    expert: int | None = None
    half: int | None = None


def part_of(name: str, is_bert: bool) -> TensorPart:
    """Return the place of their tensor. A name that no rule matches stays as it is."""
    for pattern, new in _RULES:
        name = pattern.sub(new, name)
    if not is_bert:
        name = re.sub(r"^encoder\.", "decoder.", name)
    half = expert = None
    if found := _HALF.fullmatch(name):
        name = found[1]
        half = "wv".index(found[2])
    if found := _EXPERT.fullmatch(name):
        name = f"{found[1]}.{found[3]}.{found[4]}"
        expert = int(found[2])
    elif found := _GROUPED.fullmatch(name):
        name = found[1]
        expert = int(found[2])
    return TensorPart(name, expert, half)


def is_bert(names: Sequence[str]) -> bool:
    """Return whether the names are those of a BERT."""
    return any(
        name.startswith(("lm_head.", "binary_head.", "pooler.")) or "tokentype" in name
        for name in names
    )


def layer_of(name: str) -> int | None:
    """Return the number of the layer in a name of ours; None outside of layers."""
    found = _LAYER.fullmatch(name)
    return int(found[2]) if found else None


def in_layer(name: str, layer: int) -> str:
    """Return the name with another number of the layer."""
    found = _LAYER.fullmatch(name)
    return f"{found[1]}.{layer}.{found[3]}" if found else name


def flattened(nested: Any, prefix: str = "") -> dict[str, StoredTensor]:
    """Return the tensors of nested dicts in their order, under names joined with dots, without what is ignored."""
    found: dict[str, StoredTensor] = {}
    for key, value in fields_of(nested).items():
        name = f"{prefix}{key}"
        if IGNORED.fullmatch(name):
            continue
        if isinstance(value, StoredTensor):
            found[name] = value
        elif isinstance(value, Mapping):
            found |= flattened(value, f"{name}.")
    return found
