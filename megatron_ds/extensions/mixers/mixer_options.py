"""`MixerOptions`: the part of `ModelConfig` about layers with a state of constant size, and where they stand."""

from dataclasses import dataclass

from ...config.options.need import need
from ...config.options.option import option
from .letters import NORMS, STATES

PATTERN = need("model.mixer_pattern")
STATE = PATTERN | need("model.linear_attention_freq")
BY_FLAG = "It is for models that were trained so."


@dataclass(frozen=True)
class MixerOptions:
    """Names are Megatron's where it has them. Without a pattern all layers have attention."""

    mixer_pattern: str | None = option(
        None,
        strip="\"'",
        help="The layers of a hybrid model, a character each: M Mamba-2, G gated delta net, * attention, - "
        "feed-forward, E experts, such as M-M-M*-. Each layer is one of them with its norm and residual sum, and "
        "--num-layers counts all of them.",
        avoid="In YAML, put it in quotes.",
    )
    linear_attention_freq: str | None = option(
        None,
        strip="\"'",
        help="Which layers have a mixer with a state in place of attention, before their feed-forward: N for all "
        "but every Nth layer; or a list with 1 for each layer with it and 0 for each with attention, such as "
        "([1]*3+[0])*12 (Qwen3-Next). Default: none.",
        avoid="In YAML, put a list in quotes.",
    )
    linear_attention_type: str = option(
        "gated_delta_net",
        flags=["--experimental-attention-variant"],
        choices=tuple(STATES),
        needs=need("model.linear_attention_freq"),
        help="What the layers of --linear-attention-freq have in place of attention; mamba is Mamba-2 (Bamba); "
        "mamba_beside_attention adds the outputs of Mamba-2 and of attention (Falcon-H1).",
    )
    linear_num_key_heads: int = option(
        16,
        at_least=1,
        needs=STATE,
        help="Heads of queries and keys of a gated delta net.",
    )
    linear_num_value_heads: int = option(
        32,
        at_least=1,
        needs=STATE,
        help="Heads of values of a gated delta net, a multiple of the heads of keys.",
    )
    linear_key_head_dim: int = option(
        128, at_least=1, needs=STATE, help="Width of a key head of a gated delta net."
    )
    linear_value_head_dim: int = option(
        128, at_least=1, needs=STATE, help="Width of a value head of a gated delta net."
    )
    linear_conv_kernel_dim: int = option(
        4,
        at_least=1,
        unit="tokens",
        needs=STATE,
        help="Tokens that the convolution of a gated delta net sees.",
    )
    linear_negative_eigenvalues: bool = option(
        False,
        needs=STATE,
        help="A gated delta net corrects by up to twice the error of its state, so that the state may turn "
        "(Grazzi et al. 2024, arXiv:2411.12537; OLMo-Hybrid).",
        avoid=BY_FLAG,
    )
    linear_norm_epsilon: float | None = option(
        None,
        at_least=0,
        needs=STATE,
        help="Added to mean squares in the norm of a gated delta net (1e-5 in OLMo-Hybrid). Default: --norm-epsilon.",
        avoid=BY_FLAG,
    )
    norms_behind_attention: bool = option(
        False,
        help="Blocks with attention have norms behind both halves, and none before them (OLMo-Hybrid).",
        avoid=BY_FLAG,
    )
    qk_layernorm_of_all_heads: bool = option(
        False,
        help="Norms of all heads of queries together, and of all heads of keys (OLMo-Hybrid).",
        avoid=f"Tensor-parallel ranks add squares in each layer. {BY_FLAG}",
    )
    mamba_num_heads: int | None = option(
        None,
        at_least=1,
        needs=STATE,
        help="Heads of Mamba-2. Default: 2 × hidden size / width of a head.",
    )
    mamba_head_dim: int = option(
        64, at_least=1, needs=STATE, help="Width of a head of Mamba-2."
    )
    mamba_num_groups: int = option(
        8,
        at_least=1,
        needs=STATE,
        help="Groups of heads of Mamba-2 that share B and C, and a norm.",
        avoid="It must be a multiple of the tensor-parallel size.",
    )
    mamba_state_dim: int = option(
        128, at_least=1, needs=STATE, help="Width of B and C of Mamba-2."
    )
    mamba_conv_kernel_dim: int = option(
        4,
        at_least=1,
        unit="tokens",
        needs=STATE,
        help="Tokens that the convolution of Mamba-2 sees.",
    )
    mamba_least_step: float = option(
        0.0,
        at_least=0,
        needs=STATE,
        help="Least step Δ of Mamba-2 (0.001 in Nemotron-H).",
        avoid=BY_FLAG,
    )
    mamba_norm: str = option(
        "gated",
        choices=NORMS,
        needs=STATE,
        help="Norm of the result of Mamba-2: of its product with the gate, before this product, or none (Falcon-H1).",
        avoid=BY_FLAG,
    )
    mixer_multipliers: tuple[float, ...] | None = option(
        None,
        needs=need("model.linear_attention_freq"),
        help="Eleven factors of the activations of blocks with Mamba-2 beside attention (Falcon-H1): of the input "
        "and of the output of attention, the same of Mamba-2, of its parts z, x, B, C and dt, of the gate and of the "
        "output of the feed-forward. Default: 1.",
        avoid=BY_FLAG,
    )
    attention_output_gate: bool = option(
        False,
        help="Multiply the output of each head of attention by the sigmoid of a projection of its input "
        "(Qwen3-Next).",
        avoid="Half as many weights again for the queries of attention.",
    )

    @property
    def mixer_kinds(self) -> str:
        """The character of each layer, as in --mixer-pattern. Raises ConfigError."""
        from .layer_kinds import kinds_of

        return kinds_of(self)

    @property
    def mamba_heads(self) -> int:
        """Heads of Mamba-2. The rules want a hidden size that the width of a head divides."""
        default = 2 * self.hidden_size // self.mamba_head_dim  # type: ignore[attr-defined]
        return self.mamba_num_heads or default
