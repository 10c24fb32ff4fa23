"""Megatron-DeepSpeed's GPT: names of its tensors, of its layer files, and its arguments.

    module      language_model.encoder.layers.0.mlp.dense_h_to_4h.weight
    pipeline    2.mlp.dense_h_to_4h.weight            the number of the layer in the list of layers

The names of a pipeline are brought to those of the module by what a layer holds, since its number depends on
the options of the run.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ....config.options.model import ModelConfig
from ....errors import CheckpointError
from ..beyond_megatron import check_known_to_megatron
from ..family import Family, Row
from ..files.stored_tensor import RawCheckpoint, StoredTensor
from ..packings import QKV_ROWS, SAME
from ..settings_table import Fixed, Key, Only, SettingRule, options_of, settings_of

# as --family takes them
NAME = "mds-gpt"
PIPELINE = "mds-gpt-pipeline"
PACKINGS = {"heads": SAME, "thirds": QKV_ROWS}
ROOT = "language_model."
OURS = "decoder.layers.{i}."
THEIRS = f"{ROOT}encoder.layers.{{i}}."
EMBEDDING = f"{ROOT}embedding."
QKV = "self_attention.query_key_value.weight"
LAYER = {
    "input_layernorm": "input_layernorm",
    "self_attention.linear_qkv": "self_attention.query_key_value",
    "self_attention.linear_proj": "self_attention.dense",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "mlp.linear_fc1": "mlp.dense_h_to_4h",
    "mlp.linear_fc2": "mlp.dense_4h_to_h",
}
ROWS = (
    Row("embedding.word_embeddings.weight", f"{EMBEDDING}word_embeddings.weight"),
    Row(
        "embedding.position_embeddings.weight", f"{EMBEDDING}position_embeddings.weight"
    ),
    *(
        Row(f"{OURS}{ours}.{{leaf}}", f"{THEIRS}{theirs}.{{leaf}}")
        for ours, theirs in LAYER.items()
    ),
    Row("decoder.final_layernorm.{leaf}", f"{ROOT}encoder.final_layernorm.{{leaf}}"),
    Row("output_layer.weight", f"{ROOT}output_layer.weight"),
)

# Arguments as Megatron-DeepSpeed stores them. A switch that is absent is off.
ARGUMENTS: tuple[SettingRule, ...] = (
    *(Key(name, name) for name in ("num_layers", "hidden_size", "num_attention_heads")),
    Key("ffn_hidden_size", "ffn_size", None, option="ffn_hidden_size"),
    Key("kv_channels", "head_dim", None, option="kv_channels"),
    Key("max_position_embeddings", "positions", None, option="max_position_embeddings"),
    Key("layernorm_epsilon", "norm_epsilon", 1e-5),
    Key(
        "normalization",
        "normalization",
        "layernorm",
        {
            "layernorm": "LayerNorm",
            "LayerNorm": "LayerNorm",
            "rmsnorm": "RMSNorm",
            "RMSNorm": "RMSNorm",
        },
    ),
    Key("apply_layernorm_1p", "apply_layernorm_1p", False),
    Key("add_bias_linear", "add_bias_linear", True),
    Key(
        "untie_embeddings_and_output_weights",
        "untie_embeddings_and_output_weights",
        False,
    ),
    Key("rotary_percent", "rotary_percent", None),
    Only("transformer_impl", ("local",), "tensors under other names"),
    Only(
        "num_experts",
        (None, 1, [1]),
        "experts with DeepSpeed's gate, which an engine computes",
    ),
)
FIXED = (Fixed("model", "gpt"),)


def model_options(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return our model options. Raises CheckpointError for arguments that are missing or not computed here."""
    options = options_of((*ARGUMENTS, *FIXED), args)
    rotary = bool(args.get("use_rotary_position_embeddings"))
    learned = args.get("add_position_embedding", not rotary)
    if rotary:
        options["position_embedding_type"] = "rope"
    elif learned:
        options["position_embedding_type"] = "learned_absolute"
    else:
        options["position_embedding_type"] = "none"
    options["activation"] = activation_of(args)
    heads = args.get("num_attention_heads")
    groups = args.get("num_key_value_heads")
    if groups is not None and groups != heads:
        options["num_query_groups"] = groups
    if not rotary:
        options.pop("rotary_percent", None)
    return options


def activation_of(args: Mapping[str, Any]) -> str:
    """Return our activation. Their gelu is the tanh form if it is fused with its bias, else the exact one."""
    switches = {
        "swiglu": "swiglu",
        "squared_relu": "squared_relu",
        "openai_gelu": "gelu",
        "onnx_safe": "gelu_exact",
    }
    chosen = [ours for theirs, ours in switches.items() if args.get(theirs)]
    if len(chosen) > 1:
        raise CheckpointError(
            f"the arguments choose several activations: {', '.join(chosen)}"
        )
    if chosen:
        return chosen[0]
    return "gelu" if args.get("bias_gelu_fusion", True) else "gelu_exact"


def arguments_of(model: ModelConfig) -> dict[str, Any]:
    """Return the arguments of which `model_options` makes the same model. Raises CheckpointError."""
    # What Megatron-DeepSpeed does not compute cannot be written for it.
    check_known_to_megatron(model, "Megatron-DeepSpeed")
    if model.window_size is not None or model.softmax_type != "vanilla":
        raise CheckpointError(
            "Megatron-DeepSpeed computes no sliding windows and no sinks in the softmax. "
            "Choose another format."
        )
    scaled = (
        model.use_rope_scaling
        or model.rotary_seq_len_interpolation_factor not in (None, 1)
    )
    if (
        model.position_embedding_type in ("alibi", "yarn")
        or scaled
        or model.rotary_ntk_factor is not None
    ):
        raise CheckpointError(
            "Megatron-DeepSpeed computes neither ALiBi nor scaled rotary frequencies. "
            "Choose another format."
        )
    # Choices with several arguments are added to those with one.
    found = settings_of(ARGUMENTS, model) | {"seq_length": model.seq_length}
    found |= {
        "use_rotary_position_embeddings": model.position_embedding_type == "rope",
        "add_position_embedding": model.position_embedding_type == "learned_absolute",
        "num_key_value_heads": model.query_groups,
        "swiglu": model.activation == "swiglu",
        "squared_relu": model.activation == "squared_relu",
        "bias_gelu_fusion": model.activation == "gelu",
    }
    return found


def family(packing: str, name: str = NAME) -> Family:
    """Return the family with query_key_value packed as "heads" or "thirds"; its tensors under the module's names."""
    rows = tuple(
        replace(row, packing=PACKINGS[packing])
        if "query_key_value" in row.theirs
        else row
        for row in ROWS
    )
    return Family(
        name,
        rows,
        model_options,
        arguments_of,
        ignored=("*.inv_freq", "*.rotary_pos_emb.*"),
        tied=((f"{ROOT}output_layer.weight", f"{EMBEDDING}word_embeddings.weight"),),
    )


# ---- Names.


def pipeline_name(name: str, model: ModelConfig) -> str:
    """Return the name in a pipeline of a tensor that has `name` in the module."""
    leaf = name.removeprefix(ROOT)
    if leaf.startswith("embedding."):
        tied = not model.untie_embeddings_and_output_weights
        return (
            f"{'tied_modules.embed' if tied else 1}.{leaf.removeprefix('embedding.')}"
        )
    if leaf.startswith("output_layer."):
        return f"{model.num_layers + 3}.lm_head.weight"
    if leaf.startswith("encoder.final_layernorm."):
        return f"{model.num_layers + 2}.{leaf.removeprefix('encoder.final_layernorm.')}"
    number, _, rest = leaf.removeprefix("encoder.layers.").partition(".")
    return f"{int(number) + 2}.{rest}"


def has_module_names(names: Mapping[str, Any]) -> bool:
    """Return whether names of Megatron-DeepSpeed are those of the module, not of a pipeline."""
    return any(ROOT in name for name in names)


def is_of_megatron(names: Mapping[str, Any]) -> bool:
    """Return whether tensors have the names of Megatron-DeepSpeed."""
    return any(name.endswith(QKV) for name in names)


def with_module_names(raw: RawCheckpoint) -> RawCheckpoint:
    """Return the checkpoint under the names of the module. Raises CheckpointError for layers that are not known."""
    weights = raw.tensors["weight"]
    if has_module_names(weights):
        rename = lambda name: re.sub(
            r"^(?:module\.)*language_model\.(?:transformer\.)?", ROOT, name
        ).replace(f"{ROOT}layers.", f"{ROOT}encoder.layers.")
        names = {name: rename(name) for name in weights}
    else:
        names = _names_of_layers(weights, raw.folder)
    tensors = {
        kind: {names.get(name, name): tensor for name, tensor in named.items()}
        for kind, named in raw.tensors.items()
    }
    return replace(raw, tensors=tensors)


def _layer_and_leaf(name: str) -> tuple[str, str]:
    """Return (digits of the layer, name in it) of a name in a pipeline."""
    if name.startswith("tied_modules."):
        return "0", name.split(".", 2)[2]
    digits, _, leaf = name.partition(".")
    return digits, leaf


def _names_of_layers(
    weights: Mapping[str, StoredTensor], folder: object
) -> dict[str, str]:
    """Return the mapping name in a pipeline → name in the module."""
    # The leaves of each layer identify it.
    leaves: dict[int, set[str]] = {}
    for name in weights:
        digits, leaf = _layer_and_leaf(name)
        if not digits.isdecimal():
            raise CheckpointError(
                f"{folder}: {name} is not the name of a tensor of Megatron-DeepSpeed."
            )
        leaves.setdefault(int(digits), set()).add(leaf)
    # Layers with attention are the transformer's, numbered in their order.
    blocks = {
        number: i
        for i, number in enumerate(
            sorted(n for n, held in leaves.items() if QKV in held)
        )
    }
    # Other layers are embeddings, the final norm and the head.
    names = {}
    for name in weights:
        digits, leaf = _layer_and_leaf(name)
        number = int(digits)
        if number in blocks:
            names[name] = f"{ROOT}encoder.layers.{blocks[number]}.{leaf}"
        elif "embeddings" in leaf:
            names[name] = f"{EMBEDDING}{leaf}"
        elif (
            leaf == "lm_head.weight"
            or leaves[number] == {"weight"}
            and len(weights[name].shape) == 2
        ):
            names[name] = f"{ROOT}output_layer.weight"
        elif leaves[number] <= {"weight", "bias"} and number > max(blocks):
            names[name] = f"{ROOT}encoder.final_layernorm.{leaf}"
        else:
            raise CheckpointError(
                f"{weights[name].place}: layer {number} of the pipeline holds {leaf}, "
                "which no layer of Megatron-DeepSpeed's GPT does."
            )
    return names


def packing_of(raw: RawCheckpoint, model: ModelConfig, wanted: str | None) -> str:
    """Return the packing of query_key_value: the one that the user states, or the only one that fits the files.

    Raises CheckpointError where both fit, or if "thirds" is stated for grouped queries: their thirds are not
    queries, keys and values.
    """
    if wanted == "thirds" and model.query_groups != model.num_attention_heads:
        raise CheckpointError(
            f"{raw.folder}: --qkv-packing thirds, and {model.num_attention_heads} heads "
            f"share {model.query_groups} keys and values: Megatron-DeepSpeed then cuts the "
            "rows into equal thirds, which are not queries, keys and values, so that what "
            "it trained is no attention that this package computes."
        )
    if wanted is not None:
        return wanted
    if model.num_attention_heads == 1:
        return "heads"  # the same as thirds
    if not raw.progress.iteration and len(raw.tensors) == 1:
        return "heads"  # written by a converter, before any training
    from ..tensor_parallel_merge import unknown_packing

    raise CheckpointError(unknown_packing(raw.folder))
