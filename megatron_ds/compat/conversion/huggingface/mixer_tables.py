"""Settings of families with layers of a state of constant size, as tables (`settings_table.py`)."""

from ..settings_table import Fixed, Key, Only
from .mixer_settings import HalfLayers, LinearLayers
from .tables import (
    ATTENTION_DROPOUT,
    DEVIATION,
    FFN,
    GROUPS,
    HEAD_DIM,
    NO_BIAS,
    QK_NORM,
    QWEN_MOE,
    SHARED,
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
NEMOTRON_H = (
    HalfLayers(),
    Key("hidden_size", "hidden_size"),
    Key("num_attention_heads", "num_attention_heads"),
    Key("max_position_embeddings", "positions", option="max_position_embeddings"),
    Key("vocab_size", "vocab_size"),
    Key(
        "tie_word_embeddings",
        "untie_embeddings_and_output_weights",
        False,
        {True: False, False: True},
    ),
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
