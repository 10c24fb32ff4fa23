"""`MoEOptions`: the part of `ModelConfig` that describes layers with experts.

Names are Megatron's. Where Megatron-DeepSpeed spells an option in another way, that spelling is accepted too.
"""

from dataclasses import dataclass, fields

from ...errors import ConfigError
from .layer_pattern import read_layer_pattern
from .need import need
from .option import option

BALANCING = (
    "aux_loss",
    "seq_aux_loss",
    "global_aux_loss",
    "sinkhorn",
    "expert_choice",
    "none",
)
# Values of the option above that replace the choice of the best experts of a token.
CHOICES = (
    "sinkhorn",
    "expert_choice",
)

EXPERTS = need("model.num_experts")
CAPACITY = need("model.moe_expert_capacity_factor")


@dataclass(frozen=True)
class MoEOptions:
    """Experts, router, losses and capacity. Without `num_experts` all layers are dense."""

    num_experts: tuple[int, ...] | None = option(
        None,
        at_least=1,
        help="Number of experts of each MoE layer; several numbers give each MoE layer its own, first to "
        "last (a pyramid, PR-MoE). A single 1 is a dense model. Default: no experts.",
    )
    moe_layer_freq: str = option(
        "1",
        values={"-1": "1"},
        strip="\"'",
        needs=EXPERTS,
        help="Which layers have experts, counting from 0: N for layers 0, N, 2N, …; or one 0 or 1 for each "
        "layer as a list such as ([0]*1+[1]*23).",
        avoid="--expert-interval counts from 1 as in Megatron-DeepSpeed; give only one of the two. In YAML, "
        "put a list in quotes.",
    )
    expert_interval: int | None = option(
        None,
        at_least=1,
        needs=EXPERTS,
        help="Layers N, 2N, … have experts, counting from 1, as in Megatron-DeepSpeed.",
    )
    moe_ffn_hidden_size: int | None = option(
        None,
        at_least=1,
        needs=EXPERTS,
        help="Width inside an expert. Default: --ffn-hidden-size.",
    )
    moe_shared_expert_intermediate_size: int | None = option(
        None,
        at_least=1,
        needs=EXPERTS,
        help="Total width of the shared experts, which process every token. Default: none.",
    )
    moe_shared_expert_gate: bool = option(
        False,
        needs=EXPERTS,
        help="Multiply the output of the shared experts by a sigmoid of the token.",
    )
    mlp_type: str = option(
        "standard",
        choices=("standard", "residual"),
        needs=EXPERTS,
        help="residual: MoE layers also have a dense feed-forward, and a softmax of the token weighs the "
        "two (residual MoE, Rajbhandari et al. 2022).",
    )

    moe_router_topk: int = option(
        2,
        at_least=1,
        flags=["--topk"],
        needs=EXPERTS,
        help="Number of experts of a token.",
    )
    moe_router_score_function: str = option(
        "softmax",
        choices=("softmax", "sigmoid"),
        needs=EXPERTS,
        help="How scores follow from the router's logits.",
    )
    moe_router_linear_bias: bool = option(
        False,
        needs=EXPERTS,
        help="Give the router's logits a bias that is trained as its weight is (gpt-oss).",
        avoid="It is for models that were trained so.",
    )
    moe_router_pre_softmax: bool = option(
        False,
        needs=EXPERTS,
        help="Softmax over all experts before the choice, so that the weights of the chosen ones sum to "
        "less than 1. Default: over the chosen ones.",
    )
    moe_router_topk_scaling_factor: float | None = option(
        None, above=0, needs=EXPERTS, help="Factor of all routing weights."
    )
    moe_router_num_groups: int | None = option(
        None,
        at_least=1,
        needs=EXPERTS,
        help="Divide the experts into this many groups and choose groups first.",
    )
    moe_router_group_topk: int | None = option(
        None, at_least=1, needs=EXPERTS, help="Number of groups of a token."
    )
    moe_router_enable_expert_bias: bool = option(
        False,
        needs=EXPERTS,
        help="Balance the load by a bias of each expert that affects the choice only, moved after each step "
        "(Wang et al. 2024, arXiv:2408.15664). Needs --moe-router-score-function sigmoid.",
    )
    moe_router_bias_update_rate: float = option(
        1e-3,
        at_least=0,
        needs=need("model.moe_router_enable_expert_bias"),
        help="By how much a step moves the bias of an expert.",
    )
    moe_router_dtype: str = option(
        "fp32",
        choices=("fp32", "fp64"),
        needs=EXPERTS,
        help="Dtype in which the router computes.",
    )
    moe_router_noise: str = option(
        "none",
        choices=("none", "jitter", "gumbel"),
        needs=EXPERTS,
        help="Noise in training. jitter: the router's input is multiplied by numbers close to 1; gumbel: "
        "noise is added to the scores that choose. Both depend on seed, layer and token only.",
    )
    moe_input_jitter_eps: float | None = option(
        None,
        above=0,
        below=1,
        needs=EXPERTS,
        help="Width of the jitter: the numbers are between 1 - width and 1 + width. Alone it selects "
        "--moe-router-noise jitter. Default: 0.01.",
    )

    moe_router_load_balancing_type: tuple[str, ...] = option(
        ("aux_loss",),
        choices=BALANCING,
        needs=EXPERTS,
        help="aux_loss: over the tokens of a micro-batch (Fedus et al. 2021); seq_aux_loss: of each "
        "sequence; global_aux_loss: with the load of the previous step; sinkhorn: the choice itself is "
        "balanced; expert_choice: each expert chooses its tokens (bidirectional models).",
    )
    moe_aux_loss_coeff: tuple[float, ...] = option(
        (0.0,),
        at_least=0,
        flags=["--moe-loss-coeff"],
        needs=EXPERTS,
        help="Weight of the load balancing loss, one for each --moe-router-load-balancing-type. Usual: 1e-2, "
        "with a bias 1e-4.",
    )
    moe_z_loss_coeff: float | None = option(
        None,
        at_least=0,
        needs=EXPERTS,
        help="Weight of the z-loss, mean of logsumexp² of the logits (Zoph et al. 2022). Usual: 1e-3.",
    )

    moe_expert_capacity_factor: float | None = option(
        None,
        above=0,
        flags=["--moe-train-capacity-factor"],
        needs=EXPERTS,
        help="An expert takes at most ceil(factor × k × tokens / experts) tokens, of each sequence. Default: "
        "no limit (dropless).",
    )
    moe_eval_capacity_factor: float | None = option(
        None,
        above=0,
        needs=CAPACITY,
        help="The factor in evaluation. Default: no limit.",
    )
    moe_token_dropping: bool = option(
        True,
        switches={"--disable-moe-token-dropping": False},
        needs=EXPERTS,
        help="Apply the capacity factors. Without them no token is dropped anyway.",
    )
    moe_min_capacity: int = option(
        0,
        at_least=0,
        unit="tokens",
        needs=CAPACITY,
        help="The least capacity of an expert.",
    )
    moe_token_drop_policy: str = option(
        "probs",
        choices=("probs", "position"),
        needs=CAPACITY,
        help="Which tokens an expert drops beyond its capacity: those of the least weight, or the last.",
    )
    moe_capacity_scope: str = option(
        "sequence",
        choices=("sequence", "micro-batch"),
        needs=CAPACITY,
        help="Which tokens compete for an expert's capacity.",
        avoid="micro-batch makes the result depend on the micro-batch size.",
    )
    moe_pad_expert_input_to_capacity: bool = option(
        False,
        needs=CAPACITY,
        help="Every expert computes exactly its capacity of rows; empty ones are zero. Shapes and traffic "
        "then do not depend on the data.",
    )

    @property
    def moe_choice(self) -> str:
        """How experts and tokens are matched: "top-k", "sinkhorn" or "expert_choice"."""
        return next(
            (kind for kind in self.moe_router_load_balancing_type if kind in CHOICES),
            "top-k",
        )

    def experts_of_layers(self, num_layers: int) -> tuple[int, ...]:
        """Return the number of experts of each layer, 0 for a dense layer. Raises ConfigError."""
        if self.num_experts is None:
            return (0,) * num_layers
        chosen = self._moe_layers(num_layers)
        numbers = self.num_experts
        count = sum(chosen)
        if count and len(numbers) not in (1, count):
            raise ConfigError(
                f"--num-experts has {len(numbers)} numbers, but {count} of {num_layers} layers "
                f"have experts. Give one number{f', or {count}' if count > 1 else ''}."
            )
        each = iter(numbers if len(numbers) > 1 else numbers * count)
        return tuple(next(each) if is_moe else 0 for is_moe in chosen)

    def _moe_layers(self, num_layers: int) -> list[bool]:
        if self.expert_interval is not None:
            return [(i + 1) % self.expert_interval == 0 for i in range(num_layers)]
        pattern = read_layer_pattern(self.moe_layer_freq, "--moe-layer-freq")
        if isinstance(pattern, int):
            return [i % pattern == 0 for i in range(num_layers)]
        if len(pattern) != num_layers:
            raise ConfigError(
                f"--moe-layer-freq {self.moe_layer_freq} describes {len(pattern)} layers, but "
                f"the model has {num_layers}. Give one entry for each layer."
            )
        return [bool(x) for x in pattern]


# The paths of all these options.
MOE_PATHS = tuple(f"model.{field.name}" for field in fields(MoEOptions))
