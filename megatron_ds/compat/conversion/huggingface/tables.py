"""Settings of each family in `config.json` of Hugging Face, as tables (`settings_table.py`)."""

from ..settings_table import Fixed, Key, Only
from .experts import BY_SOFTMAX, BiasedExperts
from .latents import (
    Absent,
    ExpertGroups,
    LatentScores,
    LatentWidths,
    LayerKinds,
)
from .predictions import PredictionLayers
from .rules import (
    Derived,
    EmbeddingDropout,
    FalconBlock,
    MptAttention,
    Multiplier,
    MultiQuery,
    QueryScalar,
    RotaryByWindow,
    RotaryDim,
    ScoreScale,
    UnrotatedListed,
    UnrotatedWithoutWindow,
)
from .windows import (
    Window,
    layers_by_pattern,
    layers_from_first,
    layers_or_all,
    listed_layers,
)

# tie_word_embeddings → untie_embeddings_and_output_weights.
TIED = {
    True: False,
    False: True,
}
GELUS = {
    "gelu": "gelu_exact",
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "gelu_fast": "gelu",
    "relu": "relu",
}
TANH = "gelu_pytorch_tanh"
TANH_GELUS = {TANH: "gelu", **GELUS}
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


FFN = Key("intermediate_size", "ffn_size", option="ffn_hidden_size")
GROUPS = Key("num_key_value_heads", "query_groups", None, option="num_query_groups")
HEAD_DIM = Key("head_dim", "head_dim", None, option="kv_channels")
ATTENTION_DROPOUT = Key("attention_dropout", "attention_dropout", 0.0)
DEVIATION = Key("initializer_range", "init_method_std", 0.02)
# What all descendants of Llama have.
RMS = (
    *_sizes(),
    Fixed("normalization", "RMSNorm"),
    FFN,
    GROUPS,
    HEAD_DIM,
    Key("rms_norm_eps", "norm_epsilon", 1e-6),
    DEVIATION,
)
GROUPED = (*RMS, ATTENTION_DROPOUT)
SWIGLU = Key("hidden_act", "activation", "silu", {"silu": "swiglu"})
LLAMA = (
    *GROUPED,
    ROTARY,
    _tied(False),
    Fixed("hidden_dropout", 0.0),
    SWIGLU,
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
# Whether the weights of a token's experts sum to 1.
NORMALIZED = Key(
    "norm_topk_prob", "moe_router_pre_softmax", False, {True: False, False: True}
)
QWEN_MOE = (
    *LLAMA,
    *MOE,
    Key("moe_intermediate_size", "expert_ffn_size", option="moe_ffn_hidden_size"),
    NORMALIZED,
)
BIASED_MOE = (
    *LLAMA,
    *NO_BIAS,
    BiasedExperts(),
    Key("moe_intermediate_size", "expert_ffn_size", option="moe_ffn_hidden_size"),
    Key("routed_scaling_factor", "moe_router_topk_scaling_factor", 1.0),
    Only("norm_topk_prob", (True,)),
    Only("n_group", (1,), why="groups of experts"),
    Only("topk_group", (1,), why="groups of experts"),
)
GLM4_MOE = (
    *BIASED_MOE,
    Key("attention_bias", "add_qkv_bias", False),
    Key("use_qk_norm", "qk_layernorm", False),
    PredictionLayers(),
)
DOTS1 = (*BIASED_MOE, *QK_NORM[1:], Window(has_switch=False, layers=layers_from_first))
INDEXER = "sparse attention with an indexer (DSA)"
# Multi-latent attention, with experts.
LATENT = (
    *_sizes(),
    Fixed("normalization", "RMSNorm"),
    FFN,
    LatentWidths(),
    LatentScores(),
    Key("rms_norm_eps", "norm_epsilon", 1e-6),
    DEVIATION,
    ATTENTION_DROPOUT,
    ROTARY,
    _tied(False),
    Fixed("hidden_dropout", 0.0),
    SWIGLU,
    *NO_BIAS,
    Key("moe_intermediate_size", "expert_ffn_size", option="moe_ffn_hidden_size"),
    Key("routed_scaling_factor", "moe_router_topk_scaling_factor", 1.0),
    Only("attention_bias", (False,), why="biases of the projections to the latents"),
    Only("mlp_bias", (False,)),
    Only("moe_layer_freq", (1,)),
    *(Absent(f"index_{name}", INDEXER) for name in ("topk", "n_heads", "head_dim")),
)
INTERLEAVED = Key("rope_interleave", "rotary_interleaved", True)
DEEPSEEK_V3 = (
    *LATENT,
    INTERLEAVED,
    BiasedExperts(),
    ExpertGroups(2, ("noaux_tc", "noaux_tc")),
    Only("norm_topk_prob", (True,)),
    Only("scoring_func", ("sigmoid",)),
    PredictionLayers(),
)
GLM4_MOE_LITE = (*DEEPSEEK_V3, LayerKinds())
DEEPSEEK_V2 = (
    *LATENT,
    Fixed("rotary_interleaved", True),
    BiasedExperts(choice=BY_SOFTMAX),
    ExpertGroups(1, ("greedy", "group_limited_greedy")),
    Only("norm_topk_prob", (False,), why="which transformers does not read"),
    Only("scoring_func", ("softmax",)),
)
SHARED = (
    Key("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
    Fixed("moe_shared_expert_gate", True),
)
QWEN2_MOE = (*QWEN_MOE, *SWITCHED_QKV_BIAS, *SHARED, Window(layers=listed_layers))
QWEN3_MOE = (*QWEN_MOE, *QK_NORM, Window())
GPT_OSS = (
    *GROUPED,
    ROTARY,
    _tied(False),
    *MOE,
    Fixed("hidden_dropout", 0.0),
    Fixed("activation", "clamped_swiglu"),
    Fixed("softmax_type", "learnable"),
    Fixed("moe_router_linear_bias", True),
    Key("attention_bias", "add_bias_linear", True),
    Only("hidden_act", ("silu",)),
    Only("swiglu_alpha", (1.702,)),
    Only("swiglu_limit", (7.0,)),
    Window(128, has_switch=False, layers=layers_by_pattern, hides=False),
)

PLAIN = (*GROUPED, ROTARY, _tied(False), Fixed("hidden_dropout", 0.0))
NEIGHBOURS = Fixed("rotary_interleaved", True)
GLM = (
    *LLAMA,
    *NO_BIAS,
    NEIGHBOURS,
    Key("attention_bias", "add_qkv_bias", True),
)
GLM4 = (*GLM, Fixed("norm_after_sublayer", True))
HELIUM = (
    *LLAMA,
    *NO_BIAS,
    NEIGHBOURS,
    Key("attention_bias", "add_qkv_bias", False),
    Only("mlp_bias", (False,)),
)
ERNIE = (
    *RMS,
    ROTARY,
    _tied(True),
    SWIGLU,
    NEIGHBOURS,
    Fixed("attention_dropout", 0.0),
    Fixed("hidden_dropout", 0.0),
    Key("use_bias", "add_bias_linear", False),
)
SEED_OSS = (
    *GROUPED,
    ROTARY,
    _tied(False),
    SWIGLU,
    *NO_BIAS,
    Key("attention_bias", "add_qkv_bias", True),
    Only("attention_out_bias", (False,)),
    Only("mlp_bias", (False,)),
    Key("residual_dropout", "hidden_dropout", 0.1),
)
GRANITE_FACTORS = (
    ScoreScale(),
    Multiplier("embedding_multiplier", "embedding_multiplier"),
    Multiplier("residual_multiplier", "residual_multiplier"),
    Multiplier("logits_scaling", "logit_multiplier", divides=True),
)
GRANITE = (*LLAMA, *LLAMA_BIAS, *GRANITE_FACTORS)
SMOLLM3 = (
    *GROUPED,
    ROTARY,
    _tied(True),
    SWIGLU,
    *LLAMA_BIAS,
    Fixed("hidden_dropout", 0.0),
    UnrotatedListed(),
    Only("use_sliding_window", (False,)),
)
COHERE_BASE = (
    *_sizes(),
    ROTARY,
    _tied(True),
    SWIGLU,
    *NO_BIAS,
    NEIGHBOURS,
    FFN,
    GROUPS,
    Fixed("use_parallel_residual", True),
    Fixed("shared_block_norm", True),
    Fixed("use_bias_in_norms", False),
    Fixed("hidden_dropout", 0.0),
    Key("layer_norm_eps", "norm_epsilon", 1e-5),
    Multiplier("logit_scale", "logit_multiplier", 0.0625),
    ATTENTION_DROPOUT,
    DEVIATION,
    Only("attention_bias", (False,)),
)
COHERE = (
    *COHERE_BASE,
    Only("use_qk_norm", (False,), why="weights of its own for the norm of each head"),
)
COHERE2 = (
    *COHERE_BASE,
    UnrotatedWithoutWindow(),
    Window(has_switch=False, layers=layers_by_pattern, hides=False),
)
RELU2 = Key("hidden_act", "activation", "relu2", {"relu2": "squared_relu"})
ARCEE = (*PLAIN, *LLAMA_BIAS, RELU2)
MINISTRAL = (*LLAMA, *NO_BIAS, Window(has_switch=False, layers=layers_or_all))
NEMOTRON = (
    *_sizes(),
    ROTARY,
    _tied(False),
    *LLAMA_BIAS,
    RELU2,
    FFN,
    GROUPS,
    HEAD_DIM,
    Fixed("apply_layernorm_1p", True),
    Fixed("hidden_dropout", 0.0),
    Key("norm_eps", "norm_epsilon", 1e-5),
    ATTENTION_DROPOUT,
    DEVIATION,
)
STABLELM = (
    *_sizes(),
    ROTARY,
    _tied(False),
    SWIGLU,
    *NO_BIAS,
    FFN,
    GROUPS,
    Fixed("hidden_dropout", 0.0),
    Key("use_qkv_bias", "add_qkv_bias", False),
    Key("use_parallel_residual", "use_parallel_residual", False),
    Key("use_parallel_residual", "shared_block_norm", False),
    Key("layer_norm_eps", "norm_epsilon", 1e-5),
    ATTENTION_DROPOUT,
    DEVIATION,
    Only("qk_layernorm", (False,), why="weights of its own for the norm of each head"),
    Only("hidden_dropout", (0.0,), why="dropout behind the feed-forward alone"),
)
STARCODER2 = (
    *_sizes(),
    ROTARY,
    _tied(True),
    FFN,
    GROUPS,
    Key("use_bias", "add_bias_linear", True),
    Key("norm_epsilon", "norm_epsilon", 1e-5),
    Key("hidden_act", "activation", TANH, TANH_GELUS),
    Key("residual_dropout", "hidden_dropout", 0.0),
    EmbeddingDropout(0.0, "embedding_dropout", "residual_dropout"),
    ATTENTION_DROPOUT,
    DEVIATION,
    Window(None, has_switch=False),
)
BIOGPT = (
    *_sizes(),
    _tied(True),
    FFN,
    Fixed("norm_epsilon", 1e-5),
    Derived("hidden_size", "embedding_multiplier", lambda width: width**0.5),
    Key("hidden_act", "activation", "gelu", GELUS),
    Key("hidden_dropout_prob", "hidden_dropout", 0.1),
    Key("attention_probs_dropout_prob", "attention_dropout", 0.1),
    DEVIATION,
    Only("scale_embedding", (True,)),
    Only("activation_dropout", (0.0,), why="dropout inside of the feed-forward"),
)
GPT2_BASE = (
    *_sizes("n_layer", "n_embd", "n_head", "n_positions"),
    _tied(True),
    Key("n_inner", "ffn_size", None, option="ffn_hidden_size"),
    Key("layer_norm_epsilon", "norm_epsilon", 1e-5),
    Key("resid_pdrop", "hidden_dropout", 0.1),
    EmbeddingDropout(0.1),
    Key("attn_pdrop", "attention_dropout", 0.1),
    DEVIATION,
    Only("scale_attn_weights", (True,)),
    Only("add_cross_attention", (False, None)),
)
GPT2 = (
    *GPT2_BASE,
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
    Only("scale_attn_by_inverse_layer_idx", (False,)),
)
GPT_BIGCODE = (
    *GPT2_BASE,
    Key("activation_function", "activation", TANH, TANH_GELUS),
    MultiQuery(),
)
GPT_NEOX = (
    *_sizes(),
    ROTARY,
    _tied(False),
    FFN,
    Key("layer_norm_eps", "norm_epsilon", 1e-5),
    Key("hidden_act", "activation", "gelu", GELUS),
    Key("use_parallel_residual", "use_parallel_residual", True),
    Only("attention_bias", (True,)),
    Key("hidden_dropout", "hidden_dropout", 0.0),
    ATTENTION_DROPOUT,
    DEVIATION,
)
PHI3 = (
    *GROUPED,
    ROTARY,
    _tied(False),
    SWIGLU,
    *NO_BIAS,
    Only("attention_bias", (False,)),
    Key("resid_pdrop", "hidden_dropout", 0.0),
    EmbeddingDropout(0.0),
    Window(None, has_switch=False),
)
GEMMA_BASE = (
    *GROUPED,
    _tied(True),
    *NO_BIAS,
    Fixed("hidden_dropout", 0.0),
    Fixed("apply_layernorm_1p", True),
    Derived("hidden_size", "embedding_multiplier", lambda width: width**0.5),
    Only("attention_bias", (False,)),
    Only("use_bidirectional_attention", (False, None)),
)
GEMMA = (
    *GEMMA_BASE,
    ROTARY,
    Key("hidden_act", "activation", TANH, {TANH: "geglu", "gelu": "geglu"}),
    Only("hidden_activation", (TANH, None)),
)
GEMMA2 = (
    *GEMMA_BASE,
    ROTARY,
    Fixed("norm_after_sublayer", True),
    Key("hidden_activation", "activation", TANH, {TANH: "geglu"}),
    QueryScalar(),
    Key("attn_logit_softcapping", "attention_logit_softcapping", None),
    Key("final_logit_softcapping", "final_logit_softcapping", None),
    Window(has_switch=False, layers=layers_by_pattern, hides=False),
)
GEMMA3 = (
    *GEMMA_BASE,
    RotaryByWindow(),
    Fixed("qk_layernorm", True),
    Fixed("norm_after_sublayer", True),
    Key("hidden_activation", "activation", TANH, {TANH: "geglu"}),
    QueryScalar(),
    Key("final_logit_softcapping", "final_logit_softcapping", None),
    Only("attn_logit_softcapping", (None,)),
    Window(has_switch=False, layers=layers_by_pattern, hides=False),
)
PARALLEL = (
    Fixed("use_parallel_residual", True),
    Fixed("shared_block_norm", True),
)
GPTJ = (
    *_sizes("n_layer", "n_embd", "n_head", "n_positions"),
    _tied(False),
    *PARALLEL,
    RotaryDim(),
    Fixed("use_bias_in_attn_linear", False),
    Fixed("output_layer_bias", True),
    Key("n_inner", "ffn_size", None, option="ffn_hidden_size"),
    Key("layer_norm_epsilon", "norm_epsilon", 1e-5),
    Key("activation_function", "activation", "gelu_new", GELUS),
    Key("resid_pdrop", "hidden_dropout", 0.0),
    EmbeddingDropout(0.0),
    Key("attn_pdrop", "attention_dropout", 0.0),
    DEVIATION,
)
PHI = (
    *_sizes(),
    ROTARY,
    _tied(False),
    *PARALLEL,
    Fixed("output_layer_bias", True),
    FFN,
    GROUPS,
    Key("layer_norm_eps", "norm_epsilon", 1e-5),
    Key("hidden_act", "activation", "gelu_new", GELUS),
    Key("qk_layernorm", "qk_layernorm", False),
    Key("resid_pdrop", "hidden_dropout", 0.0),
    EmbeddingDropout(0.0),
    ATTENTION_DROPOUT,
    DEVIATION,
)
FALCON = (
    *_sizes(),
    ROTARY,
    _tied(True),
    FalconBlock(),
    Key("bias", "add_bias_linear", False),
    Key("ffn_hidden_size", "ffn_size", None, option="ffn_hidden_size"),
    Key("layer_norm_epsilon", "norm_epsilon", 1e-5),
    Key("activation", "activation", "gelu", GELUS),
    Key("hidden_dropout", "hidden_dropout", 0.0),
    ATTENTION_DROPOUT,
    DEVIATION,
    Only(
        "alibi", (False,), why="slopes that are divided by the root of a head's width"
    ),
)
MPT = (
    *_sizes("n_layers", "d_model", "n_heads", "max_seq_len"),
    _tied(True),
    MptAttention(),
    Fixed("add_bias_linear", False),
    Fixed("use_bias_in_norms", False),
    Fixed("activation", "gelu_exact"),
    Key("layer_norm_epsilon", "norm_epsilon", 1e-5),
    DEVIATION,
    Only("no_bias", (True,)),
    Only("logit_scale", (None,)),
    Only("expansion_ratio", (4,)),
)
BLOOM = (
    *_sizes("n_layer", "hidden_size", "n_head", "seq_length"),
    _tied(True),
    Fixed("position_embedding_type", "alibi"),
    Fixed("embed_layernorm", True),
    Fixed("activation", "gelu"),
    Key("layer_norm_epsilon", "norm_epsilon", 1e-5),
    Key("hidden_dropout", "hidden_dropout", 0.0),
    ATTENTION_DROPOUT,
    DEVIATION,
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
    ATTENTION_DROPOUT,
    Key("init_std", "init_method_std", 0.02),
    Only("do_layer_norm_before", (True,), why="norms after the sums as in OPT-350m"),
    Only("layer_norm_elementwise_affine", (True,)),
    Only("_remove_final_layer_norm", (False,)),
)
MEGATRON_BERT = (
    *_sizes(),
    _tied(True),
    Fixed("model", "bert"),
    FFN,
    Key("layer_norm_eps", "norm_epsilon", 1e-12),
    Key("hidden_act", "activation", "gelu", GELUS),
    Key("hidden_dropout_prob", "hidden_dropout", 0.1),
    Key("attention_probs_dropout_prob", "attention_dropout", 0.1),
    DEVIATION,
    Only("type_vocab_size", (2,)),
    Only("is_decoder", (False,)),
    Only("add_cross_attention", (False,)),
    Only("position_embedding_type", ("absolute",)),
)
