"""The values of a model's options that determine shapes and meaning of its weights."""

from collections.abc import Mapping
from dataclasses import replace

from ..config.options.model import ModelConfig
from .architecture import MODELS
from .attention import scaled_rotary_base
from .attention_layouts import attention_layouts
from .gpt import further_fields
from .mixers import mixers_of

# A checkpoint is refused if one differs.
MODEL_FIELDS = (
    "model",
    "num_layers",
    "hidden_size",
    "ffn_size",
    "num_attention_heads",
    "query_groups",
    "head_dim",
    "activation",
    "normalization",
    "norm_epsilon",
    "position_embedding_type",
    "positions",
    "rotary_base",
    "rotary_percent",
    "add_bias_linear",
    "untie_embeddings_and_output_weights",
    "vocab_size",
)

# The same, left out where they have their default: earlier versions saved none of them.
FEATURE_FIELDS = (
    "add_qkv_bias",
    "qk_layernorm",
    "rotary_interleaved",
    "rotary_seq_len_interpolation_factor",
    "use_rope_scaling",
    "rope_scaling_factor",
    "original_max_position_embeddings",
    "yarn_rotary_scaling_factor",
    "yarn_beta_fast",
    "yarn_beta_slow",
    "yarn_mscale",
    "yarn_mscale_all_dim",
    "yarn_correction_range_round_to_int",
    "apply_layernorm_1p",
    "use_parallel_residual",
    "embed_layernorm",
    "window_size",
    "window_attn_skip_freq",
    "softmax_type",
    "shared_block_norm",
    "norm_after_sublayer",
    "use_bias_in_attn_linear",
    "use_bias_in_norms",
    "output_layer_bias",
    "embedding_multiplier",
    "residual_multiplier",
    "logit_multiplier",
    "no_rope_freq",
    "softmax_scale",
    "attention_logit_softcapping",
    "final_logit_softcapping",
    "window_rotary_base",
    "moe_router_linear_bias",
)

# The same, of positions that are in no weight: a model with such positions can be lengthened.
POSITION_FIELDS = (
    "position_embedding_type",
    "positions",
    "rotary_base",
    "window_rotary_base",
    "rotary_seq_len_interpolation_factor",
    "use_rope_scaling",
    "rope_scaling_factor",
    "original_max_position_embeddings",
    "yarn_rotary_scaling_factor",
    "yarn_beta_fast",
    "yarn_beta_slow",
    "yarn_mscale",
    "yarn_mscale_all_dim",
    "yarn_correction_range_round_to_int",
)
SCALABLE = (
    {"rope", "yarn"},
    {"alibi"},
    {"none"},
)  # types of positions that have the same weights

# The same of models with experts.
MOE_FIELDS = (
    "expert_ffn_size",
    "moe_shared_expert_intermediate_size",
    "moe_shared_expert_gate",
    "mlp_type",
    "moe_choice",
    "moe_router_topk",
    "moe_router_score_function",
    "moe_router_pre_softmax",
    "moe_router_topk_scaling_factor",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "moe_router_enable_expert_bias",
)


def model_identity(model: ModelConfig) -> dict:
    """Return the values that determine shapes and meaning of the weights. Those of experts only where there are any.

    `experts` is the number of experts of each layer, 0 for a dense one.
    """
    model = _with_positions_alike(model)
    experts = {"experts": model.experts} if any(model.experts) else {}
    names = (
        *MODEL_FIELDS,
        *MODELS[model.model].fields,
        *(MOE_FIELDS if experts else ()),
    )
    of_mixers = (name for mixer in mixers_of(model) for name in mixer.fields)
    others = {
        name: value
        for name in (
            *FEATURE_FIELDS,
            *attention_layouts().fields,
            *of_mixers,
            *further_fields(),
        )
        if (value := getattr(model, name)) != getattr(ModelConfig, name)
    }
    return experts | {name: getattr(model, name) for name in names} | others


def with_positions_of(ours: Mapping, theirs: Mapping) -> dict:
    """Return the identity `theirs` with the positions of `ours`, if its weights fit those; else `theirs`.

    Rotary frequencies and the longest sequence are in no weight; a table of learned positions is one.
    """
    types = {ours.get("position_embedding_type"), theirs.get("position_embedding_type")}
    if not any(types <= alike for alike in SCALABLE):
        return dict(theirs)
    kept = {
        name: value for name, value in theirs.items() if name not in POSITION_FIELDS
    }
    return kept | {name: ours[name] for name in POSITION_FIELDS if name in ours}


def why_positions_differ(ours: Mapping, theirs: Mapping) -> str:
    """Return a sentence on what to do, if the identities differ in positions alone; else ""."""
    if _are_equal(theirs, ours):
        return ""
    if _are_equal(with_positions_of(ours, theirs), ours):
        return " Add --finetune to train its weights with these positions, from step 0."
    rows = theirs.get("positions")
    learned = {"position_embedding_type": "learned_absolute"}
    if not _are_equal(
        {**theirs, "positions": None}, {**ours, **learned, "positions": None}
    ):
        return ""
    return (
        f" Its table of learned positions has {rows} rows, which cannot be stretched: use "
        f"--max-position-embeddings {rows} and sequences of up to {rows} tokens. Models with "
        "--position-embedding-type rope, yarn or alibi can be lengthened."
    )


def _are_equal(theirs: Mapping, ours: Mapping) -> bool:
    """Return whether two identities are; one of a file has lists in place of tuples."""
    plain = [
        {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in identity.items()
        }
        for identity in (theirs, ours)
    ]
    return plain[0] == plain[1]


def _with_positions_alike(model: ModelConfig) -> ModelConfig:
    """Options that rotate alike are made equal: dynamic NTK is another base, and YaRN has a factor."""
    if model.rotary_ntk_factor is not None:
        return replace(
            model,
            rotary_base=scaled_rotary_base(model),
            rotary_ntk_factor=None,
            original_max_position_embeddings=None,
        )
    if model.position_embedding_type == "yarn":
        return replace(model, yarn_rotary_scaling_factor=model.yarn_factor)
    return model
