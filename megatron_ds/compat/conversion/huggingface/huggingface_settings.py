"""`config.json` of Hugging Face ↔ options of our models, for each family.

Spellings of transformers 4 and 5 are read, and both are written:

    transformers 5                                    transformers 4
    dtype                                             torch_dtype
    rope_parameters {rope_type, rope_theta,           rope_scaling {type or rope_type, factor, …},
        partial_rotary_factor, factor, …}             rope_theta, rotary_emb_base, rotary_pct
    num_local_experts                                 num_experts
"""

from collections.abc import Mapping
from typing import Any

from ....config.options.model_options import ModelConfig
from ....errors import CheckpointError
from ..settings_table import Fixed, Key, Only, options_of, settings_of
from .huggingface_experts import EXPERT_KEYS, expert_options, expert_settings
from .huggingface_keys import ROTARY_KEYS, WINDOW_KEYS, check_keys, notes_of
from .huggingface_rotary import rotary_options, rotary_settings
from .huggingface_windows import FULL, Window, layers_from_first, listed_layers

Settings = Mapping[str, Any]
TIED = {
    True: False,
    False: True,
}  # tie_word_embeddings → untie_embeddings_and_output_weights
GELUS = {
    "gelu": "gelu_exact",
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "gelu_fast": "gelu",
    "relu": "relu",
}
ROTARY = Fixed("position_embedding_type", "rope")


def _sizes(
    layers: str = "num_hidden_layers",
    hidden: str = "hidden_size",
    heads: str = "num_attention_heads",
    positions: str = "max_position_embeddings",
) -> tuple[Key, ...]:
    return (
        Key(layers, "num_layers"),
        Key(hidden, "hidden_size"),
        Key(heads, "num_attention_heads"),
        Key(positions, "positions", option="max_position_embeddings"),
        Key("vocab_size", "vocab_size"),
    )


def _tied(default: bool) -> Key:
    return Key(
        "tie_word_embeddings", "untie_embeddings_and_output_weights", default, TIED
    )


LLAMA = (
    *_sizes(),
    ROTARY,
    _tied(False),
    Fixed("normalization", "RMSNorm"),
    Fixed("hidden_dropout", 0.0),
    Key("intermediate_size", "ffn_size", option="ffn_hidden_size"),
    Key("num_key_value_heads", "query_groups", None, option="num_query_groups"),
    Key("head_dim", "head_dim", None, option="kv_channels"),
    Key("rms_norm_eps", "norm_epsilon", 1e-6),
    Key("hidden_act", "activation", "silu", {"silu": "swiglu"}),
    Key("attention_dropout", "attention_dropout", 0.0),
    Key("initializer_range", "init_method_std", 0.02),
)
LLAMA_BIAS = (
    Key("attention_bias", "add_bias_linear", False),
    Key("mlp_bias", "add_bias_linear", False),
)
NO_BIAS = (Fixed("add_bias_linear", False),)
QKV_BIAS = (*NO_BIAS, Fixed("add_qkv_bias", True))
SWITCHED_QKV_BIAS = (*NO_BIAS, Key("qkv_bias", "add_qkv_bias", True))
QK_NORM = (*NO_BIAS, Fixed("qk_layernorm", True), Only("attention_bias", (False,)))
QWEN2 = (*LLAMA, *QKV_BIAS, Window(layers=layers_from_first))
QWEN3 = (*LLAMA, *QK_NORM, Window(layers=layers_from_first))
MISTRAL = (*LLAMA, *NO_BIAS, Window(has_switch=False))
ROUTED = Key("num_experts_per_tok", "moe_router_topk")
MOE = (ROUTED,)
MIXTRAL = (*LLAMA, *NO_BIAS, *MOE, Window(None, has_switch=False))
QWEN_MOE = (
    *LLAMA,
    *MOE,
    Key("moe_intermediate_size", "expert_ffn_size", option="moe_ffn_hidden_size"),
    Key("norm_topk_prob", "moe_router_pre_softmax", False, {True: False, False: True}),
)
SHARED = (
    Key("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
    Fixed("moe_shared_expert_gate", True),
)
QWEN2_MOE = (*QWEN_MOE, *SWITCHED_QKV_BIAS, *SHARED, Window(layers=listed_layers))
QWEN3_MOE = (*QWEN_MOE, *QK_NORM, Window())

GPT2 = (
    *_sizes("n_layer", "n_embd", "n_head", "n_positions"),
    _tied(True),
    Key("n_inner", "ffn_size", None, option="ffn_hidden_size"),
    Key("layer_norm_epsilon", "norm_epsilon", 1e-5),
    Key(
        "activation_function",
        "activation",
        "gelu_new",
        {
            "gelu_new": "gelu",
            "gelu_pytorch_tanh": "gelu",
            "gelu": "gelu_exact",
            "relu": "relu",
        },
    ),
    Key("resid_pdrop", "hidden_dropout", 0.1),
    Key("attn_pdrop", "attention_dropout", 0.1),
    Key("embd_pdrop", "hidden_dropout", 0.1),
    Key("initializer_range", "init_method_std", 0.02),
    Only("scale_attn_weights", (True,)),
    Only("scale_attn_by_inverse_layer_idx", (False,)),
    Only("add_cross_attention", (False, None)),
)
GPT_NEOX = (
    *_sizes(),
    ROTARY,
    _tied(False),
    Key("intermediate_size", "ffn_size", option="ffn_hidden_size"),
    Key("layer_norm_eps", "norm_epsilon", 1e-5),
    Key("hidden_act", "activation", "gelu", GELUS),
    Key("use_parallel_residual", "use_parallel_residual", True),
    Only("attention_bias", (True,)),
    Key("hidden_dropout", "hidden_dropout", 0.0),
    Key("attention_dropout", "attention_dropout", 0.0),
    Key("initializer_range", "init_method_std", 0.02),
)
BLOOM = (
    *_sizes("n_layer", "hidden_size", "n_head", "seq_length"),
    _tied(True),
    Fixed("position_embedding_type", "alibi"),
    Fixed("embed_layernorm", True),
    Fixed("activation", "gelu"),
    Key("layer_norm_epsilon", "norm_epsilon", 1e-5),
    Key("hidden_dropout", "hidden_dropout", 0.0),
    Key("attention_dropout", "attention_dropout", 0.0),
    Key("initializer_range", "init_method_std", 0.02),
    Only(
        "apply_residual_connection_post_layernorm",
        (False,),
        why="residuals that are taken after the norms",
    ),
)
OPT = (
    *_sizes(),
    _tied(True),
    Key("ffn_dim", "ffn_size", option="ffn_hidden_size"),
    Key(
        "activation_function",
        "activation",
        "relu",
        {"relu": "relu", "gelu": "gelu_exact", "gelu_new": "gelu"},
    ),
    Fixed("norm_epsilon", 1e-5),
    Key("enable_bias", "add_bias_linear", True),
    Key("dropout", "hidden_dropout", 0.1),
    Key("attention_dropout", "attention_dropout", 0.0),
    Key("init_std", "init_method_std", 0.02),
    Only("do_layer_norm_before", (True,), why="norms after the sums as in OPT-350m"),
    Only("layer_norm_elementwise_affine", (True,)),
    Only("_remove_final_layer_norm", (False,)),
)
MEGATRON_BERT = (
    *_sizes(),
    _tied(True),
    Fixed("model", "bert"),
    Key("intermediate_size", "ffn_size", option="ffn_hidden_size"),
    Key("layer_norm_eps", "norm_epsilon", 1e-12),
    Key("hidden_act", "activation", "gelu", GELUS),
    Key("hidden_dropout_prob", "hidden_dropout", 0.1),
    Key("attention_probs_dropout_prob", "attention_dropout", 0.1),
    Key("initializer_range", "init_method_std", 0.02),
    Only("type_vocab_size", (2,)),
    Only("is_decoder", (False,)),
    Only("add_cross_attention", (False,)),
    Only("position_embedding_type", ("absolute",)),
)
# Rotary values of settings that are absent, by model_type. Only gpt_neox rotates a part of each head.
DEFAULTS = {"gpt_neox": {"partial_rotary_factor": 0.25}, "mixtral": {"rope_theta": 1e6}}
# Other names of settings, which transformers renames when it reads them, by model_type.
ALIASES = {
    "bloom": {
        "n_embed": "hidden_size",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
    },
}
# Values of settings that are absent, where a table above has those of another model_type.
ABSENT = {
    "bloom": {"seq_length": 2048},
    "mistral": {"num_key_value_heads": 8},
    "qwen2": {"num_key_value_heads": 32},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
    "mixtral": {
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
    },
    "qwen2_moe": {
        "num_key_value_heads": 16,
        "num_experts_per_tok": 4,
        "num_experts": 60,
    },
    "qwen3_moe": {
        "num_key_value_heads": 4,
        "num_experts_per_tok": 8,
        "num_experts": 128,
    },
}


# ---- Their settings → our options.


def options(table: tuple, settings: Settings) -> dict[str, Any]:
    """Our model options, by a table above and by the rules that need more than one setting.

    Raises CheckpointError listing what this package does not compute.
    """
    check_keys(settings)
    settings = with_defaults(settings)
    found = options_of(table, settings)
    if ROTARY in table:
        found |= rotary_options(
            settings, DEFAULTS.get(settings.get("model_type", ""), {})
        )
        if not _has_windows(table):
            _check_attention(settings)
    if ROUTED in table:
        found |= expert_options(settings)
    if (width := settings.get("word_embed_proj_dim")) not in (
        None,
        found["hidden_size"],
    ):
        raise CheckpointError(
            f"word_embed_proj_dim is {width} with hidden_size {found['hidden_size']}: "
            "projected embeddings, as in OPT-350m, are not computed"
        )
    return found


def notes(table: tuple, settings: Settings) -> list[str]:
    """Sentences on the settings that a run does not follow; `options` accepted them."""
    extra = {"word_embed_proj_dim"}
    if ROTARY in table:
        extra |= ROTARY_KEYS | WINDOW_KEYS
    if ROUTED in table:
        extra |= EXPERT_KEYS
    return notes_of(table, frozenset(extra), with_defaults(settings))


def with_defaults(settings: Settings) -> Settings:
    """The settings under their own names, with the values of ABSENT for those that are absent."""
    model_type = settings.get("model_type")
    names = ALIASES.get(model_type, {})
    defaults = ABSENT.get(model_type, {})
    settings = {names.get(name, name): value for name, value in settings.items()}
    if {"num_experts", "num_local_experts"} & settings.keys():
        defaults = {
            name: value
            for name, value in defaults.items()
            if not name.endswith("_experts")
        }
    return {**defaults, **settings}


def _has_windows(table: tuple) -> bool:
    return any(isinstance(entry, Window) for entry in table)


def _check_attention(settings: Settings) -> None:
    window = settings.get("sliding_window")
    uses_it = settings.get("use_sliding_window", window is not None)
    if uses_it and window and window < settings.get("max_position_embeddings", 0):
        raise CheckpointError(
            f"sliding_window is {window}, and models of this model_type have no windows. "
            "Remove it; a Llama with windows is a mistral"
        )
    if odd := sorted({*(settings.get("layer_types") or ())} - {FULL}):
        raise CheckpointError(
            f"layer_types has {odd[0]!r}, and models of this model_type have {FULL!r} "
            "alone"
        )


# ---- Our options → their settings.


def settings(table: tuple, model: ModelConfig) -> dict[str, Any]:
    """Settings in the spellings of transformers 4 and 5."""
    found = settings_of(table, model)
    if ROTARY in table:
        found |= rotary_settings(model, is_partial=table is GPT_NEOX)
    if ROUTED in table:
        found |= expert_settings(model)
    return found
