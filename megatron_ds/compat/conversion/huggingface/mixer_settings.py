"""Settings of layers with a state of constant size in `config.json` of Hugging Face."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ....config.options.layer_pattern import MOST_LAYERS
from ....config.options.model import ModelConfig
from ....errors import CheckpointError
from .rules import count_of_layers, ends_of_intervals
from .windows import FULL

Settings = Mapping[str, Any]
LINEAR = "linear_attention"
# Names of layers of Nemotron-H, in both spellings → characters of --mixer-pattern.
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
        count = count_of_layers(settings)
        if count is None:
            return {}  # another entry of the table reports it
        listed = settings.get(self.theirs)
        if listed is None:
            ends = ends_of_intervals(settings, "full_attention_interval", count)
            listed = [FULL if is_end else LINEAR for is_end in ends]
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
