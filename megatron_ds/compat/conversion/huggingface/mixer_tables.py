"""Settings of families with layers of a state of constant size, as tables (`settings_table.py`)."""

from ..settings_table import Fixed, Key, Only
from .mamba_settings import (
    MAMBA,
    AllMamba,
    AllSideBySide,
    AttentionIndices,
    KeyFactor,
    MambaNorm,
    MambaWidths,
    MixerFactors,
    StepLimits,
)
from .mixer_settings import (
    GraniteExperts,
    HalfExperts,
    HalfLayers,
    LinearLayers,
    NullableRotary,
    SwitchedRotary,
    all_linear,
)
from .rules import Derived, Multiplier
from .tables import (
    ATTENTION_DROPOUT,
    DEVIATION,
    FFN,
    GRANITE_FACTORS,
    GROUPS,
    HEAD_DIM,
    LLAMA,
    NO_BIAS,
    NORMALIZED,
    QK_NORM,
    QWEN_MOE,
    ROTARY,
    SHARED,
    TIED,
)


def _same(name: str, default: int) -> Key:
    return Key(name, name, default)


DELTA_NET = (
    LinearLayers(),
    _same("linear_num_key_heads", 16),
    _same("linear_num_value_heads", 32),
    _same("linear_key_head_dim", 128),
    _same("linear_value_head_dim", 128),
    _same("linear_conv_kernel_dim", 4),
)
GATED = (
    Fixed("attention_output_gate", True),
    Fixed("apply_layernorm_1p", True),
)
QWEN3_NEXT = (*QWEN_MOE, *QK_NORM, *SHARED, *GATED, *DELTA_NET)
# Qwen3.5 has no switch: the weights of a token's experts sum to 1.
QWEN3_5_MOE = (
    *(entry for entry in QWEN3_NEXT if entry is not NORMALIZED),
    Fixed("moe_router_pre_softmax", False),
)
QWEN3_5 = (*LLAMA, *QK_NORM, *GATED, *DELTA_NET)
OLMO_NORMS = (
    *NO_BIAS,
    Fixed("norms_behind_attention", True),
    Fixed("qk_layernorm_of_all_heads", True),
    Only("attention_bias", (False,)),
)
OLMO2 = (*LLAMA, *OLMO_NORMS)
OLMO_HYBRID = (
    *(entry for entry in LLAMA if entry is not ROTARY),
    *OLMO_NORMS,
    *(
        Key(f"linear_{name}", f"linear_{name}")
        for name in "num_key_heads num_value_heads key_head_dim value_head_dim".split()
    ),
    _same("linear_conv_kernel_dim", 4),
    LinearLayers(),
    NullableRotary(),
    Key("linear_allow_neg_eigval", "linear_negative_eigenvalues", True),
    Fixed("linear_norm_epsilon", 1e-5),
)
TIED_OR_NOT = Key(
    "tie_word_embeddings", "untie_embeddings_and_output_weights", False, TIED
)
# Mamba-2 in the blocks of a Llama.
MAMBA_BLOCKS = (
    *NO_BIAS,
    Key("mamba_n_heads", "mamba_heads", 128, option="mamba_num_heads"),
    Key("mamba_n_groups", "mamba_num_groups", 1),
    Key("mamba_d_state", "mamba_state_dim", 256),
    Key("mamba_d_conv", "mamba_conv_kernel_dim", 4),
    StepLimits(),
    Only("mamba_conv_bias", (True,)),
    Only("mamba_proj_bias", (False,)),
    Only("attention_bias", (False,)),
)
BAMBA = (
    *LLAMA,
    *MAMBA_BLOCKS,
    MambaWidths(),
    AttentionIndices(),
    Only("mlp_bias", (False,)),
    Only("z_loss_coefficient", (0.0,), why="for which --z-loss-strength is here"),
)
FALCON_H1 = (
    *LLAMA,
    *MAMBA_BLOCKS,
    MambaWidths(total="mamba_d_ssm"),
    AllSideBySide(),
    MambaNorm(),
    MixerFactors(),
    KeyFactor(),
    Multiplier("embedding_multiplier", "embedding_multiplier"),
    Multiplier("lm_head_multiplier", "logit_multiplier"),
    Only("mlp_bias", (False,)),
    Only("projectors_bias", (False,)),
)
GRANITE_HYBRID = (
    *(entry for entry in LLAMA if entry not in (ROTARY, FFN)),
    *MAMBA_BLOCKS,
    *GRANITE_FACTORS,
    MambaWidths(),
    LinearLayers(MAMBA, all_linear),
    SwitchedRotary(),
    GraniteExperts(),
)
MAMBA2 = (
    AllMamba(),
    *NO_BIAS,
    Key("hidden_size", "hidden_size"),
    Key("vocab_size", "vocab_size"),
    # A state needs no positions; ours have a number of them, which is written beside the settings of transformers.
    Key("max_position_embeddings", "positions", 2048, option="max_position_embeddings"),
    TIED_OR_NOT,
    Key("num_heads", "mamba_heads", 128, option="mamba_num_heads"),
    # No layer has attention, whose heads are counted as those of the states.
    Derived("num_heads", "num_attention_heads", lambda heads: heads),
    Derived("head_dim", "kv_channels", lambda width: width),
    Key("n_groups", "mamba_num_groups", 8),
    Key("state_size", "mamba_state_dim", 128),
    Key("conv_kernel", "mamba_conv_kernel_dim", 4),
    MambaWidths("head_dim", "num_heads", "expand", absent=64),
    StepLimits(),
    Fixed("normalization", "RMSNorm"),
    Fixed("position_embedding_type", "none"),
    Fixed("hidden_dropout", 0.0),
    Fixed("attention_dropout", 0.0),
    Fixed("activation", "gelu_exact"),  # no layer has a feed-forward
    Key("layer_norm_epsilon", "norm_epsilon", 1e-5),
    Key("initializer_range", "init_method_std", 0.1),
    Only("hidden_act", ("silu",)),
    Only("use_conv_bias", (True,)),
    Only("use_bias", (False,)),
    Only("residual_in_fp32", (True, False)),
)
NEMOTRON_H = (
    HalfLayers(),
    HalfExperts(),
    Only("moe_latent_size", (None,), why="experts of a narrower input"),
    *(Only(name, (1,), why="groups of experts") for name in ("n_group", "topk_group")),
    Only("norm_topk_prob", (True,)),
    Key("hidden_size", "hidden_size"),
    Key("num_attention_heads", "num_attention_heads"),
    Key("max_position_embeddings", "positions", option="max_position_embeddings"),
    Key("vocab_size", "vocab_size"),
    TIED_OR_NOT,
    FFN,
    GROUPS,
    HEAD_DIM,
    *NO_BIAS,
    Fixed("normalization", "RMSNorm"),
    Fixed("position_embedding_type", "none"),
    Key("layer_norm_epsilon", "norm_epsilon", 1e-5),
    Key("mlp_hidden_act", "activation", "relu2", {"relu2": "squared_relu"}),
    Key("hidden_dropout", "hidden_dropout", 0.0),
    ATTENTION_DROPOUT,
    DEVIATION,
    Key("ssm_state_size", "mamba_state_dim", 128),
    Key("mamba_num_heads", "mamba_heads", 128, option="mamba_num_heads"),
    Key("mamba_head_dim", "mamba_head_dim", 64),
    Key("n_groups", "mamba_num_groups", 8),
    Key("conv_kernel", "mamba_conv_kernel_dim", 4),
    Key("time_step_min", "mamba_least_step", 0.001),
    Only("mamba_hidden_act", ("silu",)),
    Only("use_conv_bias", (True,)),
    Only("use_bias", (False,)),
    Only("mlp_bias", (False,)),
    Only("attention_bias", (False,)),
    Only("mamba_proj_bias", (False,)),
    Only("residual_in_fp32", (False,)),
)
