"""Settings of experts in `config.json` of Hugging Face ↔ options of our models.

    num_experts or num_local_experts    num_experts
    decoder_sparse_step, mlp_only_layers    moe_layer_freq; Mixtral has neither
    output_router_logits, router_aux_loss_coef    moe_aux_loss_coeff

The loss that balances experts is in the objective of transformers only if output_router_logits is true. It is
one loss over the gates of all layers together, and it counts each expert of a token:

    theirs    E Σ_e f_e p_e             f_e, p_e means over L layers; k at an even load
    ours      Σ_l E Σ_e f_le p_le / k   1 at an even load, in each layer

So our weight is theirs times k / L. Where all layers have the same load, and with one layer, both are equal.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ....config.options.layer_pattern import MOST_LAYERS
from ....config.options.model import ModelConfig
from ....errors import CheckpointError

Settings = Mapping[str, Any]
EXPERT_KEYS = frozenset(
    {
        "num_local_experts",
        "num_experts",
        "decoder_sparse_step",
        "mlp_only_layers",
        "router_aux_loss_coef",
        "output_router_logits",
    }
)
AUX_LOSS = 0.001  # router_aux_loss_coef where it is absent


BY_SIGMOID = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.0,
}
# The weights of a token's experts are their shares of all.
BY_SOFTMAX = {"moe_router_pre_softmax": True}


@dataclass(frozen=True)
class BiasedExperts:
    """Experts that are chosen by a sigmoid and a bias of each, as in GLM-4.5 and dots.llm1, or by another choice.

    n_routed_experts         num_experts
    first_k_dense_replace    moe_layer_freq: the first layers are dense
    n_shared_experts         moe_shared_expert_intermediate_size, in widths of an expert

    choice  our options of how they are chosen
    """

    theirs: str = "n_routed_experts"
    choice: Mapping[str, Any] = field(default_factory=lambda: BY_SIGMOID)

    def option_of(self, settings: Settings) -> dict[str, Any]:
        """Return our options. Raises CheckpointError."""
        # Sizes are checked before they are multiplied.
        names = (
            self.theirs,
            "num_experts_per_tok",
            "n_shared_experts",
            "moe_intermediate_size",
            "num_hidden_layers",
        )
        for name in names:
            if type(settings.get(name)) is not int or settings[name] < 1:
                raise CheckpointError(
                    f"{name} is {settings.get(name)!r}, not a number from 1 up"
                )
        number, topk, shared, width, layers = (settings[name] for name in names)
        # A token has several experts, whose weights are shares of 1.
        least = 2 if self.choice is BY_SIGMOID else 1
        if not least <= topk <= number:
            raise CheckpointError(
                f"num_experts_per_tok is {topk}, and a layer has {number} experts, of which a token has {least} or "
                "more: the weight of a single one is 1 there and its sigmoid here"
            )
        # The first layers may be dense.
        dense = settings.get("first_k_dense_replace", 0)
        if type(dense) is not int or not 0 <= dense < layers <= MOST_LAYERS:
            raise CheckpointError(
                f"first_k_dense_replace is {dense!r}, not a number of layers below {layers}"
            )
        pattern = [0] * dense + [1] * (layers - dense)
        return {
            "num_experts": (number,),
            "moe_router_topk": topk,
            "moe_shared_expert_intermediate_size": shared * width,
            **self.choice,
        } | ({"moe_layer_freq": str(pattern)} if dense else {})

    def setting_of(self, model: ModelConfig) -> dict[str, Any]:
        """Return their settings; {} without experts."""
        numbers = [number for number in model.experts if number]
        if not numbers:
            return {}
        shared = model.moe_shared_expert_intermediate_size or 0
        return {
            self.theirs: numbers[0],
            "num_experts_per_tok": model.moe_router_topk,
            "n_shared_experts": shared // model.expert_ffn_size,
            "first_k_dense_replace": model.experts.index(numbers[0]),
        }


# What `BiasedExperts` reads beside its first setting, and what changes no output.
BIASED_KEYS = frozenset(
    "num_experts_per_tok n_shared_experts first_k_dense_replace output_router_logits".split()
)


def expert_options(settings: Settings) -> dict[str, Any]:
    """Return our options. Raises CheckpointError."""
    # Families use two names for the number of experts.
    numbers = {
        settings[name]
        for name in ("num_local_experts", "num_experts")
        if name in settings
    }
    if len(numbers) > 1:
        raise CheckpointError(
            f"num_local_experts is {settings['num_local_experts']!r} and num_experts "
            f"{settings['num_experts']!r}, which are two names of one number"
        )
    number = numbers.pop() if numbers else None
    if type(number) is not int or number < 1:
        raise CheckpointError(f"num_experts is {number!r}, not a number of experts")
    topk = settings.get("num_experts_per_tok")
    if type(topk) is not int or not 1 <= topk <= number:
        raise CheckpointError(
            f"num_experts_per_tok is {topk!r}, and a layer has {number} experts"
        )
    # Some layers may be dense.
    pattern = expert_layers(settings)
    found: dict[str, Any] = {"num_experts": (number,)}
    if not all(pattern):
        found["moe_layer_freq"] = str(pattern)
    # The auxiliary loss is added only if the model outputs its router logits.
    coefficient = settings.get("router_aux_loss_coef", AUX_LOSS)
    if not settings.get("output_router_logits") or not coefficient:
        return found
    layers, _ = aux_loss_scale(settings)
    return found | {"moe_aux_loss_coeff": (round(coefficient * topk / layers, 15),)}


def expert_layers(settings: Settings) -> list[int]:
    """Return 1 for each layer with experts and 0 for each dense one. Raises CheckpointError."""
    layers = settings["num_hidden_layers"]
    step = settings.get("decoder_sparse_step", 1)
    if not all(
        type(count) is int and 1 <= count <= MOST_LAYERS for count in (layers, step)
    ):
        raise CheckpointError(
            f"num_hidden_layers is {layers!r} and decoder_sparse_step {step!r}, not "
            f"numbers of layers up to {MOST_LAYERS}"
        )
    if settings.get("model_type") in ("mixtral", "gpt_oss"):  # read neither setting
        return [1] * layers
    dense = settings.get("mlp_only_layers") or ()
    return [int(i not in dense and (i + 1) % step == 0) for i in range(layers)]


def aux_loss_scale(settings: Settings) -> tuple[int, int]:
    """Return (layers with experts, experts of a token). Their loss that balances experts is one over all layers
    and counts each expert of a token; ours is a sum over layers, divided by these numbers."""
    return max(1, sum(expert_layers(settings))), settings["num_experts_per_tok"]


def expert_settings(model: ModelConfig) -> dict[str, Any]:
    """Return their settings; {} without experts."""
    dense = [i for i, number in enumerate(model.experts) if not number]
    layers = model.num_layers - len(dense)
    numbers = sorted({number for number in model.experts if number})
    if not numbers:
        return {}
    weights = zip(model.moe_router_load_balancing_type, model.moe_aux_loss_coeff)
    weight = next((weight for kind, weight in weights if kind == "aux_loss"), 0.0)
    aux = (
        {"router_aux_loss_coef": round(weight * layers / model.moe_router_topk, 12)}
        if weight
        else {}
    )
    return {
        "num_local_experts": numbers[-1],
        "num_experts": numbers[-1],
        "decoder_sparse_step": 1,
        "mlp_only_layers": dense,
        "output_router_logits": bool(weight),
        **aux,
    }
