"""Settings of layers with a state of constant size in `config.json` of Hugging Face."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ....config.options.layer_pattern import MOST_LAYERS
from ....config.options.model import ModelConfig
from ....errors import CheckpointError
from .windows import FULL

Settings = Mapping[str, Any]
LINEAR = "linear_attention"
OLD_NAMES = {"mamba": LINEAR, "attention": FULL}
# Names of layers of Nemotron-H, in both spellings → characters of --hybrid-layer-pattern.
HALVES = {
    LINEAR: "M",
    FULL: "*",
    "mlp": "-",
    "moe": "E",
    "mamba": "M",
    "attention": "*",
}


@dataclass(frozen=True)
class LinearLayers:
    """layer_types, which names the layers with a gated delta net; if it is absent, all but every N-th have one, N being
    full_attention_interval."""

    theirs: str = "layer_types"

    def option_of(self, settings: Settings) -> dict[str, Any]:
        """Return {linear_attention_freq: layers}; {} where all have attention. Raises CheckpointError."""
        count = settings.get("num_hidden_layers")
        if type(count) is not int or not 0 < count <= MOST_LAYERS:
            return {}  # another entry of the table reports it
        listed = settings.get(self.theirs)
        if listed is None:
            every = settings.get("full_attention_interval", 4)
            if type(every) is not int or every < 1:
                raise CheckpointError(
                    f"full_attention_interval is {every!r}, not a number of layers"
                )
            listed = [FULL if (i + 1) % every == 0 else LINEAR for i in range(count)]
        if (
            not isinstance(listed, list)
            or len(listed) != count
            or {*map(str, listed)} - {LINEAR, FULL}
        ):
            raise CheckpointError(
                f"{self.theirs} is {listed!r}, and it must name {LINEAR!r} or {FULL!r} for each of {count} layers"
            )
        if LINEAR not in listed:
            return {}
        return {"linear_attention_freq": str([int(kind == LINEAR) for kind in listed])}

    def setting_of(self, model: ModelConfig) -> dict[str, Any]:
        """Return {layer_types: list}."""
        return {
            self.theirs: [FULL if kind == "*" else LINEAR for kind in model.mixer_kinds]
        }


@dataclass(frozen=True)
class MambaLayers(LinearLayers):
    """layer_types of Granite 4, which names the layers with Mamba-2; if it is absent, all have it."""

    def option_of(self, settings: Settings) -> dict[str, Any]:
        """Return {linear_attention_freq: layers} and their type. Raises CheckpointError."""
        count = settings.get("num_hidden_layers")
        if settings.get(self.theirs) is None and type(count) is int:
            settings = {**settings, self.theirs: [LINEAR] * min(count, MOST_LAYERS)}
        listed = settings.get(self.theirs)
        if isinstance(listed, list):
            renamed = [OLD_NAMES.get(str(kind), kind) for kind in listed]
            settings = {**settings, self.theirs: renamed}
        found = super().option_of(settings)
        return found and found | {"linear_attention_type": "mamba"}


@dataclass(frozen=True)
class AttentionIndices(MambaLayers):
    """attn_layer_indices of Bamba, the numbers of the layers with attention."""

    theirs: str = "attn_layer_indices"

    def option_of(self, settings: Settings) -> dict[str, Any]:
        """Return {linear_attention_freq: layers} and their type. Raises CheckpointError."""
        count = settings.get("num_hidden_layers")
        numbers = settings.get(self.theirs) or []
        if type(count) is not int or not 0 < count <= MOST_LAYERS:
            return {}  # another entry of the table reports it
        if not isinstance(numbers, list) or not {*numbers} <= {*range(count)}:
            raise CheckpointError(
                f"{self.theirs} is {numbers!r}, not numbers of {count} layers"
            )
        listed = [FULL if i in numbers else LINEAR for i in range(count)]
        named = {"num_hidden_layers": count, "layer_types": listed}
        return MambaLayers().option_of(named)

    def setting_of(self, model: ModelConfig) -> dict[str, Any]:
        """Return {attn_layer_indices: numbers}."""
        kinds = model.mixer_kinds
        return {self.theirs: [i for i, kind in enumerate(kinds) if kind == "*"]}


@dataclass(frozen=True)
class MambaWidth:
    """mamba_d_head of Bamba and Granite 4, the width of a head; "auto" for mamba_expand × hidden_size / heads."""

    theirs: str = "mamba_d_head"

    def option_of(self, settings: Settings) -> dict[str, Any]:
        """Return {mamba_head_dim: width}. Raises CheckpointError."""
        names = "hidden_size", "mamba_n_heads", "mamba_expand"
        defaults = None, 128, 2
        hidden, heads, expand = map(settings.get, names, defaults)
        if any(type(n) is not int or n < 1 for n in (hidden, heads, expand)):
            raise CheckpointError(f"{', '.join(names)} are not numbers from 1 up")
        width = settings.get(self.theirs, "auto")
        if width == "auto":
            width = expand * hidden // heads
        if type(width) is not int or width * heads != expand * hidden:
            raise CheckpointError(
                f"{self.theirs} is {width!r}, and {heads} heads have {expand} × {hidden} channels"
            )
        return {"mamba_head_dim": width}

    def setting_of(self, model: ModelConfig) -> dict[str, Any]:
        """Return {mamba_d_head: width, mamba_expand: quotient}. Raises CheckpointError."""
        channels = model.mamba_heads * model.mamba_head_dim
        if channels % model.hidden_size:
            raise CheckpointError(
                f"the {channels} channels of Mamba-2 are no multiple of hidden_size {model.hidden_size}"
            )
        return {
            self.theirs: model.mamba_head_dim,
            "mamba_expand": channels // model.hidden_size,
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
        if odd := sorted({*pattern} - {"M", "*", "-"}):
            raise CheckpointError(
                f"hybrid_override_pattern has {odd[0]!r}, and layers of Mamba-2, attention and feed-forwards are "
                "read: M, * and -. The experts of Nemotron-3 are not"
            )
        return {"num_layers": len(pattern), "hybrid_layer_pattern": pattern}

    def setting_of(self, model: ModelConfig) -> dict[str, Any]:
        """Return the list, and the pattern that earlier versions read."""
        names = {letter: name for name, letter in reversed(HALVES.items())}
        pattern = model.mixer_kinds
        return {
            self.theirs: [names[letter] for letter in pattern],
            "hybrid_override_pattern": pattern,
            "num_hidden_layers": len(pattern),
        }


# What `HalfLayers` reads beside its first setting, and what changes no output without experts.
HALF_KEYS = frozenset(
    """
    hybrid_override_pattern layer_types num_hidden_layers expand time_step_max time_step_floor time_step_limit
    chunk_size use_mamba_kernels mamba_ssm_cache_dtype num_logits_to_keep rescale_prenorm_residual
    n_routed_experts n_shared_experts moe_intermediate_size moe_shared_expert_intermediate_size moe_latent_size
    moe_shared_expert_overlap num_experts_per_tok routed_scaling_factor n_group topk_group norm_topk_prob
    num_nextn_predict_layers mtp_layers_block_type mtp_hybrid_override_pattern num_local_experts sliding_window
    """.split()
)
# The same of Bamba and Granite 4.
MAMBA_KEYS = frozenset(
    """
    mamba_expand mamba_chunk_size num_logits_to_keep layer_types layers_block_type num_experts_per_tok
    output_router_logits router_aux_loss_coef
    """.split()
)
