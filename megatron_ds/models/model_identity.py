"""The values of a model's options that determine shapes and meaning of its weights."""

from ..config.model_options import ModelConfig
from .architecture import MODELS

# A checkpoint is refused if one differs.
MODEL_FIELDS = (
    "model", "num_layers", "hidden_size", "ffn_size", "num_attention_heads", "query_groups", "head_dim",
    "activation", "normalization", "norm_epsilon", "position_embedding_type", "positions", "rotary_base",
    "rotary_percent", "add_bias_linear", "untie_embeddings_and_output_weights", "vocab_size",
)

# The same, left out where they have their default: earlier versions saved none of them.
FEATURE_FIELDS = ("add_qkv_bias", "qk_layernorm", "rotary_interleaved",
                  "rotary_seq_len_interpolation_factor", "use_rope_scaling", "rope_scaling_factor",
                  "apply_layernorm_1p", "use_parallel_residual", "window_size", "window_attn_skip_freq",
                  "softmax_type")

# The same of models with experts.
MOE_FIELDS = ("expert_ffn_size", "moe_shared_expert_intermediate_size", "moe_shared_expert_gate", "mlp_type",
              "moe_choice", "moe_router_topk", "moe_router_score_function", "moe_router_pre_softmax",
              "moe_router_topk_scaling_factor", "moe_router_num_groups", "moe_router_group_topk",
              "moe_router_enable_expert_bias")


def model_identity(model: ModelConfig) -> dict:
    """The values that determine shapes and meaning of the weights. Those of experts only where there are any.

    `experts` is the number of experts of each layer, 0 for a dense one.
    """
    experts = {"experts": model.experts} if any(model.experts) else {}
    names = (*MODEL_FIELDS, *MODELS[model.model].fields, *(MOE_FIELDS if experts else ()))
    features = {name: value for name in FEATURE_FIELDS
                if (value := getattr(model, name)) != getattr(ModelConfig, name)}
    return experts | {name: getattr(model, name) for name in names} | features
