"""Settings of multi-latent attention and its experts in `config.json` of Hugging Face ↔ options of our models.

    q_lora_rank, kv_lora_rank                          the same; q_lora_rank null: queries from the hidden state
    qk_nope_head_dim, qk_rope_head_dim, v_head_dim     qk_head_dim, qk_pos_emb_head_dim, v_head_dim
    n_group, topk_group                                moe_router_num_groups, moe_router_group_topk
    mlp_layer_types                                    moe_layer_freq

The norms of their latents have an epsilon of 1e-6 whatever rms_norm_eps is. A head of theirs has head_dim rotated
channels; that of ours is the width of a query.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ....config.options.model import ModelConfig
from ....errors import CheckpointError
from .rotary import rope_table
from .rules import count_of_layers

Settings = Mapping[str, Any]
EPSILON = 1e-6
ROPES = ("default", "yarn")
TOKEN_EXPERTS = ("num_experts_per_tok", "n_routed_experts")
MOST = 10**5  # channels of a head, or of a latent

# Their settings → our options.
WIDTHS = {
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_head_dim",
    "qk_rope_head_dim": "qk_pos_emb_head_dim",
    "v_head_dim": "v_head_dim",
}
LATENT_KEYS = frozenset(
    (
        *WIDTHS,
        "rope_interleave",
        "num_key_value_heads",
        "head_dim",
        "qk_head_dim",
        "topk_group",
        "topk_method",
    )
)


@dataclass(frozen=True)
class LatentWidths:
    """Widths of heads and latents, and the norms of the latents."""

    theirs: str = "kv_lora_rank"

    def option_of(self, settings: Settings) -> dict[str, Any]:
        """Return our options. Raises CheckpointError for what is no width."""
        found: dict[str, Any] = {"multi_latent_attention": True, "qk_layernorm": True}
        for theirs, ours in WIDTHS.items():
            value = settings.get(theirs)
            if theirs == "q_lora_rank" and value is None:
                continue
            if type(value) is not int or not 0 < value <= MOST:
                raise CheckpointError(f"{theirs} is {value!r}, not a number from 1 up")
            found[ours] = value
        heads = settings.get("num_attention_heads")
        if settings.get("num_key_value_heads") not in (None, heads):
            raise CheckpointError(
                f"num_key_value_heads is {settings['num_key_value_heads']!r} and num_attention_heads {heads!r}, and "
                "each head has a key and a value of its own"
            )
        found["kv_channels"] = found["qk_head_dim"] + found["qk_pos_emb_head_dim"]
        if settings.get("rms_norm_eps", EPSILON) != EPSILON:
            found["latent_norm_epsilon"] = EPSILON
        return found

    def setting_of(self, model: ModelConfig) -> dict[str, Any]:
        """Return their settings; {} for models without latents, which then lack a setting when they are read."""
        if not model.multi_latent_attention:
            return {}
        widths = {theirs: getattr(model, ours) for theirs, ours in WIDTHS.items()}
        heads = model.num_attention_heads
        beside = {"num_key_value_heads": heads, "head_dim": model.qk_pos_emb_head_dim}
        return widths | beside


@dataclass(frozen=True)
class LatentScores:
    """mscale_all_dim of YaRN, whose growth scales the scores: beside mscale alone it means the same in both."""

    theirs: str = "rope_parameters"

    def option_of(self, settings: Settings) -> dict[str, Any]:
        """Return {}: the rules of rotary positions set the options. Raises CheckpointError for other scales."""
        name, rope = rope_table(settings)
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in ROPES:
            raise CheckpointError(
                f"{name} has rope_type {kind!r}, and for latent attention this package computes "
                f"{' and '.join(map(repr, ROPES))}"
            )
        has_weights = rope.get("mscale") and rope.get("attention_factor") is None
        if kind == "yarn" and rope.get("mscale_all_dim") and not has_weights:
            raise CheckpointError(
                f"{name} has mscale_all_dim {rope['mscale_all_dim']!r} without mscale, or with attention_factor: "
                "rotation and scores then have growths that are not computed together"
            )
        return {}

    def setting_of(self, model: ModelConfig) -> dict[str, Any]:
        """Return {}."""
        return {}


@dataclass(frozen=True)
class ExpertGroups:
    """Groups of experts, of which a token uses some.

    best  how many experts of a group make its score in transformers; here it is those that a token has of each of
          its groups, so that the two must be equal
    ways  values of topk_method without and with groups
    """

    best: int
    ways: tuple[str, str]
    theirs: str = "n_group"

    def option_of(self, settings: Settings) -> dict[str, Any]:
        """Return our options; {} for one group. Raises CheckpointError for another score of groups."""
        plain, grouped = self.ways
        way = settings.get("topk_method", plain)
        if way not in self.ways:
            ways = " and ".join(map(repr, dict.fromkeys(self.ways)))
            raise CheckpointError(
                f"topk_method is {way!r}, and this package computes {ways}"
            )
        if way != grouped:
            return {}
        # Sizes that fit into each other.
        names = (self.theirs, "topk_group", *TOKEN_EXPERTS)
        sizes: list[Any] = [settings.get(name) for name in names]
        groups, kept, experts, number = sizes
        is_known = all(type(size) is int and size > 0 for size in sizes)
        if not is_known or number % groups or kept > groups:
            raise CheckpointError(
                f"n_group is {groups!r} and topk_group {kept!r}, not groups of {number!r} experts, and some of them"
            )
        width = number // groups
        if width < self.best or experts > kept * width:
            raise CheckpointError(
                f"num_experts_per_tok is {experts}, and {kept} groups of {width} experts have fewer, or no best "
                f"{self.best} of a group"
            )
        if groups == 1:
            return {}
        if max(1, experts // kept) != self.best:
            raise CheckpointError(
                f"num_experts_per_tok / topk_group is {experts} / {kept}: here the score of a group is the sum of so "
                f"many of its experts, and in transformers that of the best {self.best}"
            )
        return {"moe_router_num_groups": groups, "moe_router_group_topk": kept}

    def setting_of(self, model: ModelConfig) -> dict[str, Any]:
        """Return their settings."""
        return {
            "topk_method": self.ways[model.moe_router_num_groups is not None],
            self.theirs: model.moe_router_num_groups or 1,
            "topk_group": model.moe_router_group_topk or 1,
        }


@dataclass(frozen=True)
class LayerKinds:
    """mlp_layer_types of GLM-4.7-Flash: "dense" or "sparse" for each layer; absent, the first is dense, but for
    files that give first_k_dense_replace."""

    theirs: str = "mlp_layer_types"

    def option_of(self, settings: Settings) -> dict[str, Any]:
        """Return {moe_layer_freq: list}; {} where all layers have experts. Raises CheckpointError."""
        count = count_of_layers(settings)
        kinds = settings.get(self.theirs)
        if count is None:
            return {}  # another entry of the table reports it
        if kinds is None:
            if "first_k_dense_replace" in settings:
                return {}
            kinds = ["dense"] + ["sparse"] * (count - 1)
        is_list = isinstance(kinds, list) and len(kinds) == count
        if not is_list or not set(kinds) <= {"dense", "sparse"}:
            raise CheckpointError(
                f"{self.theirs} is {kinds!r}, not 'dense' or 'sparse' for each of {count} layers"
            )
        pattern = [int(kind == "sparse") for kind in kinds]
        return {} if all(pattern) else {"moe_layer_freq": str(pattern)}

    def setting_of(self, model: ModelConfig) -> dict[str, Any]:
        """Return {mlp_layer_types: list}."""
        return {self.theirs: ["sparse" if n else "dense" for n in model.experts]}


@dataclass(frozen=True)
class Absent:
    """A setting that makes another model wherever it is present. why: what it means"""

    theirs: str
    why: str

    def option_of(self, settings: Settings) -> dict[str, Any]:
        """Return {}. Raises CheckpointError."""
        if settings.get(self.theirs):
            raise CheckpointError(
                f"{self.theirs} is {settings[self.theirs]!r}: {self.why} is not computed"
            )
        return {}

    def setting_of(self, model: ModelConfig) -> dict[str, Any]:
        """Return {}."""
        return {}
