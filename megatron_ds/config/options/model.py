"""`ModelConfig`: the shape and the arithmetic of the model, independent of the number of ranks."""

import math
from dataclasses import dataclass

from .attention import AttentionOptions
from .block import BlockOptions
from .layer_pattern import MOST_LAYERS
from .moe import MoEOptions
from .need import need
from .option import added_options, option

GATED = ("swiglu", "geglu", "clamped_swiglu")  # activations of two projections


@dataclass(frozen=True)
class ModelConfig(
    AttentionOptions,
    *added_options("model"),  # type: ignore[misc]  # base classes are found at run time
    BlockOptions,
    MoEOptions,
):
    """Sizes, embeddings, norms, dropout, experts. Derived sizes are properties.

    vocab_size is None until the tokenizer of a run is known, before the model is built.
    """

    model: str = option("gpt", help="Name of a registered model.")
    num_layers: int = option(
        required=True,
        at_least=1,
        at_most=MOST_LAYERS,
        help="Number of transformer layers.",
    )
    hidden_size: int = option(
        required=True, at_least=1, help="Width of the hidden states."
    )
    ffn_hidden_size: int | None = option(
        None,
        at_least=1,
        help="Width inside the feed-forward block. Default: 4 × hidden size; with a gated activation, as swiglu, "
        "8/3 × hidden size rounded down to a multiple of 64, which has the same number of weights.",
    )
    num_attention_heads: int = option(
        required=True, at_least=1, help="Number of attention (query) heads."
    )
    num_query_groups: int | None = option(
        None,
        at_least=1,
        flags=["--num-key-value-heads"],
        help="Number of key/value heads, each shared by a group of query heads. Default: one per query head.",
        avoid="It must be a multiple of the tensor-parallel size.",
    )
    group_query_attention: bool = option(
        False,
        help="Require grouped-query attention: an error unless --num-query-groups is given too.",
        avoid="--num-query-groups alone is enough.",
    )
    kv_channels: int | None = option(
        None,
        at_least=1,
        help="Width of one head. Default: hidden size / number of heads.",
    )
    seq_length: int = option(
        required=True,
        at_least=1,
        flags=["--encoder-seq-length"],
        unit="tokens",
        help="Tokens per training sample.",
    )
    max_position_embeddings: int | None = option(
        None,
        at_least=1,
        unit="tokens",
        help="Longest sequence that the model can process. Default: the sequence length.",
    )
    position_embedding_type: str = option(
        "learned_absolute",
        choices=("learned_absolute", "rope", "yarn", "alibi", "none"),
        values={"rotary": "rope"},
        switches={
            "--use-rotary-position-embeddings": "rope",
            "--no-position-embedding": "none",
        },
        help="How the position of a token enters the model. yarn is rope with frequencies that are scaled "
        "for longer sequences; with alibi the scores of attention fall with the distance.",
    )
    rotary_base: float = option(
        10000.0,
        above=0,
        flags=["--rotary-position-embeddings-theta"],
        help="Base of the rotary angles (rope, yarn); use a larger one for long sequences.",
    )
    rotary_percent: float = option(
        1.0,
        above=0,
        at_most=1,
        help="Share of the channels of each head that are rotated (rope, yarn).",
    )
    rotary_interleaved: bool = option(
        False,
        needs=need("model.position_embedding_type", "rope", "yarn"),
        help="Rotate neighbouring channels as pairs, instead of channel i with one half a head away "
        "(rope, yarn).",
        avoid="On GPUs several operations in place of one kernel.",
    )
    rotary_seq_len_interpolation_factor: float | None = option(
        None,
        at_least=1,
        least="which scales nothing",
        help="Linear scaling: divide positions by this factor before the rotation (rope only).",
    )
    use_rope_scaling: bool = option(
        False,
        needs=need("model.position_embedding_type", "rope"),
        help="Scale the rotary frequencies as Llama 3.1 does for sequences longer than 8,192 tokens, "
        "or --original-max-position-embeddings (rope only).",
    )
    rope_scaling_factor: float = option(
        8.0,
        at_least=1,
        least="which scales nothing",
        needs=need("model.use_rope_scaling"),
        help="Factor by which --use-rope-scaling divides the low frequencies.",
    )
    rotary_ntk_factor: float | None = option(
        None,
        at_least=1,
        needs=need("model.position_embedding_type", "rope"),
        help="Alpha of dynamic NTK scaling: the rotary base grows by "
        "(alpha · L / L_original − (alpha − 1))^(d / (d − 2)), where L is "
        "--max-position-embeddings, L_original is "
        "--original-max-position-embeddings and d is the number of rotated channels "
        "(rope only).",
        avoid="YaRN needs less training for the same length.",
    )
    original_max_position_embeddings: int | None = option(
        None,
        at_least=1,
        unit="tokens",
        flags=["--yarn-original-max-position-embeddings"],
        needs=need("model.position_embedding_type", "yarn")
        | need("model.rotary_ntk_factor")
        | need("model.use_rope_scaling"),
        help="Longest sequence of the training before the rotary frequencies were scaled (yarn, "
        "--rotary-ntk-factor, --use-rope-scaling).",
    )
    yarn_rotary_scaling_factor: float | None = option(
        None,
        at_least=1,
        flags=["--rotary-scaling-factor"],
        needs=need("model.position_embedding_type", "yarn"),
        help="Factor by which YaRN divides the low frequencies (yarn only). Default: "
        "--max-position-embeddings / --original-max-position-embeddings.",
    )
    yarn_beta_fast: float = option(
        32.0,
        above=0,
        needs=need("model.position_embedding_type", "yarn"),
        help="beta_fast of YaRN: frequencies with more rotations than this over the original "
        "length are not scaled (yarn only).",
    )
    yarn_beta_slow: float = option(
        1.0,
        above=0,
        needs=need("model.position_embedding_type", "yarn"),
        help="beta_slow of YaRN: frequencies with fewer rotations than this over the original "
        "length are divided by the whole factor (yarn only).",
    )
    yarn_mscale: float = option(
        1.0,
        flags=["--mscale"],
        needs=need("model.position_embedding_type", "yarn"),
        help="mscale of YaRN: rotated queries and keys are multiplied by mscale(yarn_mscale) / "
        "mscale(yarn_mscale_all_dim), where mscale(w) = 1 + 0.1 · w · ln(factor) (yarn only).",
    )
    yarn_mscale_all_dim: float = option(
        0.0,
        flags=["--mscale-all-dim"],
        needs=need("model.position_embedding_type", "yarn"),
        help="mscale_all_dim of YaRN: weight in the denominator of that quotient (yarn only).",
    )
    yarn_correction_range_round_to_int: bool = option(
        True,
        needs=need("model.position_embedding_type", "yarn"),
        help="Round the two bounds of the YaRN ramp to whole channel pairs (yarn only).",
    )
    normalization: str = option(
        "LayerNorm",
        choices=("LayerNorm", "RMSNorm"),
        values={"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"},
        help="Type of the normalization layers.",
    )
    apply_layernorm_1p: bool = option(
        False,
        help="Normalization layers store their weight minus one, which starts at 0, and multiply by "
        "1 + weight.",
    )
    norm_epsilon: float = option(
        1e-5,
        above=0,
        flags=["--layernorm-epsilon"],
        help="Added to the variance inside a normalization layer.",
    )
    activation: str = option(
        "gelu",
        choices=(
            "gelu",
            "gelu_exact",
            "swiglu",
            "geglu",
            "clamped_swiglu",
            "relu",
            "squared_relu",
        ),
        switches={
            "--swiglu": "swiglu",
            "--squared-relu": "squared_relu",
            "--openai-gelu": "gelu",
        },
        help="Nonlinearity of the feed-forward block; gelu is the tanh approximation, also as the gate of "
        "geglu. clamped_swiglu is that of gpt-oss.",
    )
    add_bias_linear: bool = option(
        True,
        switches={"--disable-bias-linear": False},
        help="Give the linear layers biases. Without them, --activation gelu_exact is the default.",
    )
    add_qkv_bias: bool = option(
        False,
        help="Give the projection of queries, keys and values a bias, also with "
        "--disable-bias-linear.",
    )
    qk_layernorm: bool = option(
        False,
        help="Normalize each head of queries and keys before they are rotated and multiplied.",
        avoid="It is for models whose attention scores grow without bound; a checkpoint without the norms "
        "cannot be loaded.",
    )
    apply_wd_to_qk_layernorm: bool = option(
        False,
        needs=need("model.qk_layernorm"),
        help="Weight decay applies to the norms of --qk-layernorm, too.",
    )
    embed_layernorm: bool = option(
        False,
        help="Normalize the word embeddings, before positions are added and dropout (BLOOM).",
        avoid="It is for models that were trained so; in bf16 training is stable without it.",
    )
    untie_embeddings_and_output_weights: bool = option(
        False,
        help="Give the output layer its own weights.",
        avoid="In small models sharing saves a large part of all weights.",
    )
    init_method_std: float = option(
        0.02,
        at_least=0,
        help="Standard deviation of the initial weights; output projections use std / sqrt(2 × layers).",
    )
    hidden_dropout: float = option(
        0.1,
        at_least=0,
        below=1,
        help="Dropout after the embedding, attention and feed-forward.",
        avoid="0 is usual when each sample is seen once.",
    )
    attention_dropout: float = option(
        0.1,
        at_least=0,
        below=1,
        help="Dropout of attention probabilities.",
        avoid="Above 0 it excludes the fused attention kernels.",
    )
    make_vocab_size_divisible_by: int = option(
        128,
        at_least=1,
        help="The vocabulary is padded to a multiple of this × tensor-parallel size. Padding does not enter "
        "the softmax.",
    )
    vocab_size: int = option(
        None,
        at_least=1,
        flags=["--padded-vocab-size"],
        help="Size of the vocabulary. Default: the tokenizer's. If it is larger, the model has rows that no "
        "token uses, and they enter the softmax, as in Megatron.",
        avoid="Only needed for NullTokenizer, mock data and a model with such rows.",
    )

    @property
    def head_dim(self) -> int:
        """Channels of one attention head."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def query_groups(self) -> int:
        """Number of key/value heads."""
        return self.num_query_groups or self.num_attention_heads

    @property
    def is_rotary(self) -> bool:
        """Whether queries and keys are rotated."""
        return self.position_embedding_type in ("rope", "yarn")

    @property
    def yarn_factor(self) -> float:
        """By how much YaRN stretches long waves."""
        given = self.yarn_rotary_scaling_factor
        if given:
            return given
        trained = self.original_max_position_embeddings
        assert trained, "the rules demand it for YaRN without a factor"
        return max(1.0, self.positions / trained)

    @property
    def is_gated(self) -> bool:
        """Whether the feed-forward block has a gate, a second projection of its input."""
        return self.activation in GATED

    @property
    def ffn_size(self) -> int:
        """Width inside the feed-forward block."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        return (
            int(4 * self.hidden_size * 2 / 3 / 64) * 64
            if self.is_gated
            else 4 * self.hidden_size
        )

    @property
    def experts(self) -> tuple[int, ...]:
        """The number of experts of each layer, 0 for a dense layer. Raises ConfigError."""
        return self.experts_of_layers(self.num_layers)

    @property
    def expert_ffn_size(self) -> int:
        """Width inside an expert."""
        return self.moe_ffn_hidden_size or self.ffn_size

    @property
    def dense_width(self) -> int:
        """Width of the feed-forward that all tokens of a layer with experts pass; 0 for none."""
        if self.mlp_type == "residual":
            return self.ffn_size
        return self.moe_shared_expert_intermediate_size or 0

    @property
    def windowed(self) -> tuple[bool, ...]:
        """Whether each layer has the window. Raises ConfigError."""
        return self.windowed_layers(self.num_layers)

    @property
    def unrotated(self) -> tuple[bool, ...]:
        """Whether each layer is without rotary positions. Raises ConfigError."""
        return self.unrotated_layers(self.num_layers)

    @property
    def positions(self) -> int:
        """Longest sequence that the model can process."""
        return self.max_position_embeddings or self.seq_length

    def padded_vocab_size(self, tensor_parallel_size: int) -> int:
        """Return the rows of the embedding over all tensor-parallel ranks."""
        multiple = self.make_vocab_size_divisible_by * tensor_parallel_size
        return math.ceil(self.vocab_size / multiple) * multiple
