"""Settings of layers with a state of constant size in `config.json` of Hugging Face."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ....config.options.layer_pattern import MOST_LAYERS
from ....config.options.model import ModelConfig
from ....errors import CheckpointError
from .experts import BY_SIGMOID, expert_options, expert_settings
from .rotary import THETA, rotary_options, rotary_settings
from .rules import count_of_layers, ends_of_intervals
from .windows import FULL

Settings = Mapping[str, Any]
LINEAR = "linear_attention"
# Earlier names of layers.
EARLIER = {"mamba": LINEAR, "attention": FULL}
# Names of layers of Nemotron-H, in both spellings → characters of --mixer-pattern.
HALVES = {
    LINEAR: "M",
    FULL: "*",
    "mlp": "-",
    "moe": "E",
    "mamba": "M",
    "attention": "*",
}


def by_interval(settings: Settings, count: int) -> list[str]:
    """Name all layers but every N-th linear, N being full_attention_interval. Raises CheckpointError."""
    ends = ends_of_intervals(settings, "full_attention_interval", count)
    return [FULL if is_end else LINEAR for is_end in ends]


def all_linear(settings: Settings, count: int) -> list[str]:
    """Name all layers linear."""
    return [LINEAR] * count


@dataclass(frozen=True)
class LinearLayers:
    """layer_types, which names the layers with a state in place of attention, in any of two spellings.

    kind    of these layers, by --linear-attention-type; None: the default one
    absent  the names where the setting is absent
    """

    kind: str | None = None
    absent: Callable[[Settings, int], list[str]] = by_interval
    theirs: str = "layer_types"

    def option_of(self, settings: Settings) -> dict[str, Any]:
        """Return {linear_attention_freq: layers}; {} where all have attention. Raises CheckpointError."""
        count = count_of_layers(settings)
        if count is None:
            return {}  # another entry of the table reports it
        listed = settings.get(self.theirs)
        if listed is None:
            listed = self.absent(settings, count)
        if isinstance(listed, list):
            listed = [EARLIER.get(str(kind), kind) for kind in listed]
        if (
            not isinstance(listed, list)
            or len(listed) != count
            or {*map(str, listed)} - {LINEAR, FULL}
        ):
            raise CheckpointError(
                f"{self.theirs} is {listed!r}, and it must name {LINEAR!r} or {FULL!r} for each of {count} layers"
            )
        return linear_options([kind == LINEAR for kind in listed], self.kind)

    def setting_of(self, model: ModelConfig) -> dict[str, Any]:
        """Return {layer_types: list}."""
        return {
            self.theirs: [FULL if kind == "*" else LINEAR for kind in model.mixer_kinds]
        }


def linear_options(is_linear: Sequence[bool], kind: str | None) -> dict[str, Any]:
    """Return our options of the layers with a state; {} where none has one."""
    if not any(is_linear):
        return {}
    found = {"linear_attention_freq": str([*map(int, is_linear)])}
    return found if kind is None else found | {"linear_attention_type": kind}


@dataclass(frozen=True)
class SwitchedRotary:
    """position_embedding_type of Granite 4: rope, or no positions."""

    theirs: str = "position_embedding_type"

    def option_of(self, settings: Settings) -> dict[str, Any]:
        """Return our options of positions. Raises CheckpointError."""
        given = settings.get(self.theirs)
        if given == "rope":
            return {"position_embedding_type": "rope", **rotary_options(settings, {})}
        if given not in (None, "nope"):
            raise CheckpointError(
                f"{self.theirs} is {given!r}, and this package computes 'rope' and None"
            )
        return {"position_embedding_type": "none"}

    def setting_of(self, model: ModelConfig) -> dict[str, Any]:
        """Return their settings."""
        if not model.is_rotary:
            return {self.theirs: None}
        return {self.theirs: "rope", **rotary_settings(model, is_partial=False)}


@dataclass(frozen=True)
class NullableRotary:
    """rope_parameters of OLMo-Hybrid, which has no positions where rope_theta is null."""

    theirs: str = "rope_parameters"

    def option_of(self, settings: Settings) -> dict[str, Any]:
        """Return our options of positions. Raises CheckpointError."""
        table = settings.get(self.theirs)
        if table is None or isinstance(table, Mapping) and table.get(THETA) is None:
            return {"position_embedding_type": "none"}
        return {"position_embedding_type": "rope", **rotary_options(settings, {})}

    def setting_of(self, model: ModelConfig) -> dict[str, Any]:
        """Return their settings."""
        if not model.is_rotary:
            return {self.theirs: {"rope_type": "default", THETA: None}}
        return rotary_settings(model, is_partial=False)


@dataclass(frozen=True)
class GraniteExperts:
    """num_local_experts of Granite 4, beside whose experts each layer has a feed-forward for all tokens; 0: that one
    alone."""

    theirs: str = "num_local_experts"

    def option_of(self, settings: Settings) -> dict[str, Any]:
        """Return our options of feed-forwards. Raises CheckpointError."""
        number = settings.get(self.theirs, 8)
        shared = settings.get("shared_intermediate_size", 1024)
        if number == 0:
            return {"ffn_hidden_size": shared}
        width = settings.get("intermediate_size")
        return {
            **expert_options(
                {"num_experts_per_tok": 2, **settings, self.theirs: number}
            ),
            "moe_router_topk": settings.get("num_experts_per_tok", 2),
            "ffn_hidden_size": width,
            "moe_ffn_hidden_size": width,
            "moe_shared_expert_intermediate_size": shared,
        }

    def setting_of(self, model: ModelConfig) -> dict[str, Any]:
        """Return their settings."""
        numbers = {*model.experts}
        if numbers == {0}:
            shared = model.ffn_size
            return {self.theirs: 0, "shared_intermediate_size": shared}
        found = expert_settings(model)
        dense = found.pop("mlp_only_layers")
        if dense:
            raise CheckpointError(
                f"layers {dense} have no experts, and in this family all or none have them. Choose another family"
            )
        del found["num_experts"], found["decoder_sparse_step"]
        return {
            **found,
            "num_experts_per_tok": model.moe_router_topk,
            "intermediate_size": model.expert_ffn_size,
            "shared_intermediate_size": model.moe_shared_expert_intermediate_size or 0,
        }


@dataclass(frozen=True)
class HalfLayers:
    """layers_block_type of Nemotron-H, a name for each half of a block, or hybrid_override_pattern, a character."""

    theirs: str = "layers_block_type"

    def option_of(self, settings: Settings) -> dict[str, Any]:
        """Return the number of layers and their pattern. Raises CheckpointError."""
        listed = settings.get(self.theirs) or settings.get("layer_types")
        pattern = settings.get("hybrid_override_pattern")
        if listed is not None:
            if not isinstance(listed, list) or {*map(str, listed)} - HALVES.keys():
                raise CheckpointError(
                    f"{self.theirs} is {listed!r}, and it must name {', '.join(map(repr, HALVES))} for each layer"
                )
            pattern = "".join(HALVES[kind] for kind in listed)
        if not isinstance(pattern, str) or not 0 < len(pattern) <= MOST_LAYERS:
            raise CheckpointError(
                f"{self.theirs} is missing, which names what each layer is"
            )
        if odd := sorted({*pattern} - {"M", "*", "-", "E"}):
            raise CheckpointError(
                f"hybrid_override_pattern has {odd[0]!r}, and layers of Mamba-2, attention, feed-forwards and experts "
                "are read: M, *, - and E"
            )
        return {"num_layers": len(pattern), "mixer_pattern": pattern}

    def setting_of(self, model: ModelConfig) -> dict[str, Any]:
        """Return the list, and the pattern that earlier versions read."""
        names = {letter: name for name, letter in reversed(HALVES.items())}
        pattern = model.mixer_kinds
        return {
            self.theirs: [names[letter] for letter in pattern],
            "hybrid_override_pattern": pattern,
            "num_hidden_layers": len(pattern),
        }


# First values of gated delta nets.
OLMO_KEYS = frozenset(
    f"linear_{name}"
    for name in "a_log_min a_log_max dt_min dt_max dt_init_floor".split()
)
GRANITE_KEYS = frozenset(
    """
    intermediate_size shared_intermediate_size num_experts_per_tok output_router_logits router_aux_loss_coef
    num_experts layers_block_type
    """.split()
)


@dataclass(frozen=True)
class HalfExperts:
    """n_routed_experts of Nemotron-3, in layers that are experts beside a feed-forward for all tokens."""

    theirs: str = "n_routed_experts"

    def option_of(self, settings: Settings) -> dict[str, Any]:
        """Return our options; {} without such layers. Raises CheckpointError."""
        pattern = HalfLayers().option_of(settings)["mixer_pattern"]
        if "E" not in pattern:
            return {}
        usual = {self.theirs: 8, "num_experts_per_tok": 2}
        given = {name: settings.get(name, value) for name, value in usual.items()}
        number, topk = given.values()
        sizes_are_known = all(type(size) is int for size in given.values())
        # The weight of a single expert is 1 there and its sigmoid here.
        if not sizes_are_known or not 2 <= topk <= number:
            raise CheckpointError(
                f"{self.theirs} is {number!r} and num_experts_per_tok {topk!r}: a token has two experts or more, of "
                "those of a layer"
            )
        width = settings.get("moe_intermediate_size", 7688)
        return {
            "num_experts": (number,),
            "moe_layer_freq": str([int(kind == "E") for kind in pattern]),
            "moe_router_topk": topk,
            "moe_ffn_hidden_size": width,
            "moe_shared_expert_intermediate_size": settings.get(
                "moe_shared_expert_intermediate_size", 7688
            ),
            "moe_router_topk_scaling_factor": settings.get(
                "routed_scaling_factor", 1.0
            ),
            **BY_SIGMOID,
        }

    def setting_of(self, model: ModelConfig) -> dict[str, Any]:
        """Return their settings; {} without experts."""
        numbers = {*model.experts} - {0}
        if not numbers:
            return {}
        return {
            self.theirs: max(numbers),
            "num_experts_per_tok": model.moe_router_topk,
            "moe_intermediate_size": model.expert_ffn_size,
            "moe_shared_expert_intermediate_size": model.moe_shared_expert_intermediate_size
            or 0,
            "n_shared_experts": 1,
            "routed_scaling_factor": model.moe_router_topk_scaling_factor or 1.0,
            "norm_topk_prob": True,
            "n_group": 1,
            "topk_group": 1,
        }


# What the entries of Nemotron-H read beside their first settings, and what changes no output.
HALF_KEYS = frozenset(
    """
    hybrid_override_pattern layer_types num_hidden_layers expand time_step_max time_step_floor time_step_limit
    chunk_size use_mamba_kernels mamba_ssm_cache_dtype num_logits_to_keep rescale_prenorm_residual
    n_routed_experts n_shared_experts moe_intermediate_size moe_shared_expert_intermediate_size moe_latent_size
    moe_shared_expert_overlap num_experts_per_tok routed_scaling_factor n_group topk_group norm_topk_prob
    output_router_logits num_nextn_predict_layers mtp_layers_block_type mtp_hybrid_override_pattern num_local_experts
    sliding_window
    """.split()
)
