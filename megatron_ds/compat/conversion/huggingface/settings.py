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

from ....config.options.model import ModelConfig
from ....errors import CheckpointError
from ..settings_table import options_of, settings_of
from .experts import BIASED_KEYS, EXPERT_KEYS, expert_options, expert_settings
from .keys import ROTARY_KEYS, WINDOW_KEYS, check_keys, notes_of
from .latents import LATENT_KEYS
from .mamba_settings import (
    FALCON_H1_KEYS,
    MAMBA_KEYS,
    AllSideBySide,
    AttentionIndices,
)
from .mixer_settings import (
    GRANITE_KEYS,
    HALF_KEYS,
    OLMO_KEYS,
    LinearLayers,
)
from .mixer_tables import (
    BAMBA,
    FALCON_H1,
    GRANITE_HYBRID,
    MAMBA2,
    NEMOTRON_H,
    OLMO_HYBRID,
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_NEXT,
)
from .predictions import OTHER_NAME
from .rotary import rotary_options, rotary_settings
from .rules import BY_WINDOW_KEYS, FALCON_KEYS
from .tables import (
    BIOGPT,
    COHERE2,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    DOTS1,
    FALCON,
    GEMMA2,
    GEMMA3,
    GLM,
    GLM4,
    GLM4_MOE,
    GLM4_MOE_LITE,
    GPT_NEOX,
    GPT_OSS,
    GPTJ,
    MPT,
    NEMOTRON,
    PHI,
    ROTARY,
    ROUTED,
    SMOLLM3,
    STABLELM,
)
from .windows import FULL, Window

Settings = Mapping[str, Any]
# Rotary values of settings that are absent, by model_type. Those with a share may rotate a part of each head.
SHARE = "partial_rotary_factor"
DEFAULTS = {
    "gpt_neox": {SHARE: 0.25},
    "phi": {SHARE: 0.5},
    "phi3": {SHARE: 1.0},
    "mixtral": {"rope_theta": 1e6},
    "gpt_oss": {"rope_theta": 150000.0},
    "glm": {SHARE: 0.5},
    "glm4": {SHARE: 0.5},
    "glm4_moe": {SHARE: 0.5},
    "nemotron": {SHARE: 0.5},
    "stablelm": {SHARE: 0.25},
    "ernie4_5": {"rope_theta": 500000.0},
    "helium": {"rope_theta": 100000.0},
    "cohere": {"rope_theta": 500000.0},
    "smollm3": {"rope_theta": 2000000.0},
    "qwen3_next": {SHARE: 0.25},
    "qwen3_5_text": {SHARE: 0.25},
    "qwen3_5_moe_text": {SHARE: 0.25},
    "bamba": {SHARE: 0.5},
}
PARTLY = (
    GPT_NEOX,
    PHI,
    GLM,
    GLM4,
    GLM4_MOE,
    NEMOTRON,
    STABLELM,
    QWEN3_NEXT,
    QWEN3_5,
    QWEN3_5_MOE,
    BAMBA,
)
# Other names of settings, which transformers renames when it reads them, by model_type.
ALIASES = {
    "bloom": {
        "n_embed": "hidden_size",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
    },
    "gptj": {
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
    },
    "gpt_bigcode": {
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
    },
    "glm4_moe": {"num_local_experts": "n_routed_experts"},
    "dots1": {"num_local_experts": "n_routed_experts"},
    "deepseek_v3": {"num_local_experts": "n_routed_experts"},
    "kimi_k2": {"num_local_experts": "n_routed_experts"},
    "glm4_moe_lite": {"num_local_experts": "n_routed_experts"},
    "deepseek_v2": {"num_experts": "n_routed_experts"},
    "falcon": {"n_embed": "hidden_size"},
    "mpt": {
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
    },
}
OF_DEEPSEEK_V3 = {
    "num_key_value_heads": 128,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "moe_intermediate_size": 2048,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
# Values of settings that are absent, where a table above has those of another model_type.
ABSENT: Mapping[str, Mapping[str, Any]] = {
    "bloom": {"seq_length": 2048},
    "gptj": {"rotary_dim": 64, "n_positions": 2048},
    "falcon": {"max_position_embeddings": 2048},
    "mpt": {"max_seq_len": 2048},
    "phi3": {"rms_norm_eps": 1e-5},
    "gemma": {"num_key_value_heads": 16, "head_dim": 256},
    "gpt_oss": {
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "num_experts_per_tok": 4,
        "num_local_experts": 128,
        "sliding_window_pattern": 2,
        "max_position_embeddings": 131072,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    "gemma2": {
        "num_key_value_heads": 4,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "sliding_window_pattern": 2,
    },
    "gemma3_text": {
        "num_key_value_heads": 4,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
    },
    "glm": {"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1.5625e-7},
    "glm4": {"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1.5625e-7},
    "glm4_moe": {
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "n_routed_experts": 128,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 1408,
    },
    "dots1": {
        "num_key_value_heads": 32,
        "norm_topk_prob": False,
        "moe_intermediate_size": 1408,
        "max_window_layers": 62,
    },
    "deepseek_v3": OF_DEEPSEEK_V3,
    "kimi_k2": OF_DEEPSEEK_V3,
    "deepseek_v2": {
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "moe_intermediate_size": 1407,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    },
    "glm4_moe_lite": {
        "num_key_value_heads": 20,
        "rms_norm_eps": 1e-5,
        "n_routed_experts": 64,
        "num_experts_per_tok": 4,
        "n_shared_experts": 1,
        "moe_intermediate_size": 1536,
        "routed_scaling_factor": 1.8,
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": 768,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
    },
    "helium": {"num_key_value_heads": 20, "head_dim": 128, "rms_norm_eps": 1e-8},
    "ernie4_5": {"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5},
    "seed_oss": {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_dropout": 0.1,
    },
    "arcee": {"rms_norm_eps": 1e-5},
    "nemotron": {"initializer_range": 0.0134},
    "stablelm": {"num_key_value_heads": 32},
    "starcoder2": {"num_key_value_heads": 2, "initializer_range": 0.018042},
    "biogpt": {"max_position_embeddings": 1024},
    "smollm3": {"num_key_value_heads": 4},
    "cohere2": {"sliding_window_pattern": 4},
    "ministral": {"num_key_value_heads": 8},
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
    "qwen3_next": {
        "num_key_value_heads": 2,
        "head_dim": 256,
        "num_experts_per_tok": 10,
        "num_experts": 512,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
    },
    "qwen3_5_text": {"num_key_value_heads": 4, "head_dim": 256},
    "qwen3_5_moe_text": {
        "intermediate_size": 512,  # of dense layers, of which it has none
        "num_key_value_heads": 2,
        "head_dim": 256,
        "num_experts_per_tok": 8,
        "num_experts": 256,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
    "falcon_h1": {"num_key_value_heads": 8, "rms_norm_eps": 1e-5},
    "bamba": {"num_key_value_heads": 8, "rms_norm_eps": 1e-5},
    "nemotron_h": {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_attention_heads": 32,
        "max_position_embeddings": 4096,
    },
}
# Losses and ranks of DeepSeek's own training, which transformers has no code for, and what a note states.
WITHOUT_LOSS = frozenset(
    "aux_loss_alpha seq_aux ep_size num_nextn_predict_layers num_mtp_layers".split()
)
# Settings that rules of one table read, or that have no effect on its models.
BESIDE_TABLES = (
    (GEMMA2, ROTARY_KEYS | WINDOW_KEYS | {"sliding_window_pattern"}),
    (GEMMA3, ROTARY_KEYS | WINDOW_KEYS | BY_WINDOW_KEYS),
    (FALCON, FALCON_KEYS | {"apply_residual_connection_post_layernorm"}),
    (
        GPT_OSS,
        {"sliding_window_pattern", "experts_per_token", "initial_context_length"},
    ),
    (GPTJ, {"rotary", "scale_attn_weights"}),
    (MPT, {"resid_pdrop"}),
    (GLM4_MOE, BIASED_KEYS | {OTHER_NAME}),
    (DOTS1, BIASED_KEYS),
    *(
        (table, BIASED_KEYS | LATENT_KEYS | WITHOUT_LOSS)
        for table in (DEEPSEEK_V3, DEEPSEEK_V2, GLM4_MOE_LITE)
    ),
    (SMOLLM3, {"no_rope_layer_interval"}),
    (COHERE2, {"sliding_window_pattern"}),
    (NEMOTRON_H, HALF_KEYS),
    *(
        (table, {"full_attention_interval"})
        for table in (QWEN3_NEXT, QWEN3_5, QWEN3_5_MOE)
    ),
    *((table, MAMBA_KEYS) for table in (BAMBA, MAMBA2)),
    (OLMO_HYBRID, OLMO_KEYS | ROTARY_KEYS),
    (FALCON_H1, FALCON_H1_KEYS),
    (GRANITE_HYBRID, MAMBA_KEYS | GRANITE_KEYS | ROTARY_KEYS),
    (BIOGPT, {"layer_norm_eps"}),  # transformers computes with 1e-5 for all values
)


# ---- Their settings → our options.


def options(table: tuple, settings: Settings) -> dict[str, Any]:
    """Return our model options, by a table above and by the rules that need more than one setting.

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
    """Return the sentences on the settings that a run does not follow; `options` accepted them."""
    extra = {"word_embed_proj_dim"}
    if ROTARY in table:
        extra |= ROTARY_KEYS | WINDOW_KEYS
    if ROUTED in table:
        extra |= EXPERT_KEYS
    for other, names in BESIDE_TABLES:
        if table is other:
            extra |= names
    return notes_of(table, frozenset(extra), with_defaults(settings))


def with_defaults(settings: Settings) -> Settings:
    """Return the settings under their own names, with the values of ABSENT for those that are absent."""
    model_type = settings.get("model_type")
    names = ALIASES.get(str(model_type), {})
    defaults = ABSENT.get(str(model_type), {})
    settings = {names.get(name, name): value for name, value in settings.items()}
    if {"num_experts", "num_local_experts"} & settings.keys():
        defaults = {
            name: value
            for name, value in defaults.items()
            if not name.endswith("_experts")
        }
    # Another table of rotary positions replaces that of the model_type.
    if settings.get("rope_scaling"):
        settings = {"rope_parameters": None, **settings}
    return {**defaults, **settings}


# Entries of tables of models whose layers differ, which read layer_types or need none.
OTHER_LAYERS = (Window, LinearLayers, AttentionIndices, AllSideBySide)


def _has_windows(table: tuple) -> bool:
    return any(isinstance(entry, OTHER_LAYERS) for entry in table)


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
    """Return the settings in the spellings of transformers 4 and 5."""
    found = settings_of(table, model)
    if ROTARY in table:
        is_partial = any(table is other for other in PARTLY)
        found |= rotary_settings(model, is_partial)
    if ROUTED in table:
        found |= expert_settings(model)
    return found
