"""Settings of layers with a state of constant size in `config.json` of Hugging Face."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
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
MAMBA = "mamba"
BESIDE = "mamba_beside_attention"
INFINITE = {"__float__": "Infinity"}
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
class AttentionIndices:
    """attn_layer_indices of Bamba: the layers with attention. The others have Mamba-2."""

    theirs: str = "attn_layer_indices"

    def option_of(self, settings: Settings) -> dict[str, Any]:
        """Return our options of layers with Mamba-2. Raises CheckpointError."""
        count = count_of_layers(settings)
        if count is None:
            return {}  # another entry of the table reports it
        listed = settings.get(self.theirs) or []
        if not isinstance(listed, list) or not {*listed} <= {*range(count)}:
            raise CheckpointError(
                f"{self.theirs} is {listed!r}, not a list of layers, which are 0 to {count - 1}"
            )
        return linear_options([i not in listed for i in range(count)], MAMBA)

    def setting_of(self, model: ModelConfig) -> dict[str, Any]:
        """Return {attn_layer_indices: list}."""
        kinds = enumerate(model.mixer_kinds)
        return {self.theirs: [i for i, kind in kinds if kind == "*"]}


@dataclass(frozen=True)
class AllMamba:
    """num_hidden_layers of Mamba-2, each of which is a mixer without a feed-forward."""

    theirs: str = "num_hidden_layers"

    def option_of(self, settings: Settings) -> dict[str, Any]:
        """Return the number of layers and their pattern. Raises CheckpointError."""
        count = count_of_layers(settings)
        if count is None:
            raise CheckpointError(
                f"{self.theirs} is {settings.get(self.theirs)!r}, not a number of layers"
            )
        return {"num_layers": count, "mixer_pattern": "M" * count}

    def setting_of(self, model: ModelConfig) -> dict[str, Any]:
        """Return {num_hidden_layers: number}. Raises CheckpointError for layers of another kind."""
        kinds = {*model.mixer_kinds}
        if kinds != {"M"} or model.mixer_pattern is None:
            raise CheckpointError(
                "the model has other layers than Mamba-2 alone (--mixer-pattern MM..). Choose another family"
            )
        return {self.theirs: model.num_layers}


@dataclass(frozen=True)
class MambaWidths:
    """The width of a head of Mamba-2, which "auto" derives, and the factor that gives the width of all heads.

    theirs  the setting of the width; heads, expand: of their number and of the factor
    total   the setting of all heads together, which comes before the factor; "" for none
    absent  the width where it is absent; None: it is derived
    """

    theirs: str = "mamba_d_head"
    heads: str = "mamba_n_heads"
    expand: str = "mamba_expand"
    total: str = ""
    absent: int | None = None

    def option_of(self, settings: Settings) -> dict[str, Any]:
        """Return {mamba_head_dim: width}. Raises CheckpointError for widths that no head has."""
        names = {"hidden_size": None, self.heads: 128, self.expand: 2}
        values = {
            name: settings.get(name) or default for name, default in names.items()
        }
        if odd := [n for n, value in values.items() if type(value) is not int]:
            raise CheckpointError(f"{odd[0]} is {values[odd[0]]!r}, not a whole number")
        hidden, heads, expand = values.values()
        total = settings.get(self.total) or expand * hidden
        width = settings.get(self.theirs, self.absent)
        if width in (None, "auto"):
            width = total // heads
        if type(width) is not int or heads < 1 or heads * width != total:
            raise CheckpointError(
                f"{heads} heads ({self.heads}) of width {width!r} ({self.theirs}) have not the width {total} of all "
                f"of them ({self.total or self.expand})"
            )
        return {"mamba_head_dim": width}

    def setting_of(self, model: ModelConfig) -> dict[str, Any]:
        """Return their settings. Raises CheckpointError where the factor is no whole number."""
        width = model.mamba_head_dim
        total = model.mamba_heads * width
        if self.total:
            return {self.theirs: width, self.total: total}
        if total % model.hidden_size:
            raise CheckpointError(
                f"the heads of Mamba-2 have the width {total}, and in this family it is a multiple of the hidden size "
                f"{model.hidden_size}. Choose another family"
            )
        return {self.theirs: width, self.expand: total // model.hidden_size}


@dataclass(frozen=True)
class SideBySide:
    """num_hidden_layers of Falcon-H1, all of which have Mamba-2 beside attention."""

    theirs: str = "num_hidden_layers"

    def option_of(self, settings: Settings) -> dict[str, Any]:
        """Return our options of the layers."""
        count = count_of_layers(settings)
        if count is None:
            return {}  # another entry of the table reports it
        return linear_options([True] * count, BESIDE)

    def setting_of(self, model: ModelConfig) -> dict[str, Any]:
        """Return {}. Raises CheckpointError for layers of another kind."""
        if {*model.mixer_kinds} != {"+"}:
            raise CheckpointError(
                f"the model has other layers than those of --linear-attention-type {BESIDE}. Choose another family"
            )
        return {}


@dataclass(frozen=True)
class MambaNorm:
    """mamba_rms_norm and mamba_norm_before_gate of Falcon-H1."""

    theirs: str = "mamba_rms_norm"
    order: str = "mamba_norm_before_gate"

    def option_of(self, settings: Settings) -> dict[str, Any]:
        """Return {mamba_norm: kind}."""
        if not settings.get(self.theirs, False):
            return {"mamba_norm": "none"}
        is_before = settings.get(self.order, True)
        return {"mamba_norm": "before_gate" if is_before else "gated"}

    def setting_of(self, model: ModelConfig) -> dict[str, Any]:
        """Return their settings; without a norm the order is the usual one."""
        kind = model.mamba_norm
        return {self.theirs: kind != "none", self.order: kind != "gated"}


# Settings of the factors of Falcon-H1 in the order of --mixer-multipliers, with the number of their values.
FACTORS = {
    "attention_in_multiplier": 1,
    "attention_out_multiplier": 1,
    "ssm_in_multiplier": 1,
    "ssm_out_multiplier": 1,
    "ssm_multipliers": 5,
    "mlp_multipliers": 2,
}


@dataclass(frozen=True)
class MixerFactors:
    """The factors of Falcon-H1 (Zuo et al. 2025, arXiv:2507.22448, section 3)."""

    theirs: str = "ssm_multipliers"

    def option_of(self, settings: Settings) -> dict[str, Any]:
        """Return {mixer_multipliers: values}. Raises CheckpointError."""
        found: list[float] = []
        for name, count in FACTORS.items():
            given = settings.get(name)
            values = [1.0] * count if given is None else given
            values = values if isinstance(values, list | tuple) else [values]
            if len(values) != count or not all(map(_is_factor, values)):
                raise CheckpointError(
                    f"{name} is {given!r}, and {count} numbers above 0 are needed"
                )
            found += map(float, values)
        return {"mixer_multipliers": tuple(found)}

    def setting_of(self, model: ModelConfig) -> dict[str, Any]:
        """Return their settings."""
        values = iter(model.mixer_multipliers or (1.0,) * sum(FACTORS.values()))
        parts = {n: [*islice(values, count)] for n, count in FACTORS.items()}
        return {n: part if len(part) > 1 else part[0] for n, part in parts.items()}


def _is_factor(value: object) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf  # type: ignore[operator]


@dataclass(frozen=True)
class KeyFactor:
    """key_multiplier of Falcon-H1, a factor of keys and so of the scores."""

    theirs: str = "key_multiplier"

    def option_of(self, settings: Settings) -> dict[str, Any]:
        """Return {softmax_scale: value}; {} for the usual one. Raises CheckpointError."""
        value = settings.get(self.theirs, 1.0)
        heads = settings.get("num_attention_heads")
        width = settings.get("hidden_size")
        sizes = (heads, width)
        if any(type(size) is not int or size < 1 for size in sizes):
            return {}  # other entries of the table report it
        if not _is_factor(value):
            raise CheckpointError(f"{self.theirs} is {value!r}, not a number above 0")
        if value == 1:
            return {}
        channels = settings.get("head_dim") or width // heads
        return {"softmax_scale": value * channels**-0.5}

    def setting_of(self, model: ModelConfig) -> dict[str, Any]:
        """Return {key_multiplier: number}, as it was before it became a scale."""
        scale = model.softmax_scale
        if scale is None:
            return {self.theirs: 1.0}
        return {self.theirs: float(f"{scale * model.head_dim**0.5:.14g}")}


@dataclass(frozen=True)
class StepLimits:
    """time_step_limit: the least and the largest step of Mamba-2, of which the largest is infinite."""

    theirs: str = "time_step_limit"

    def option_of(self, settings: Settings) -> dict[str, Any]:
        """Return {mamba_least_step: number}. Raises CheckpointError."""
        given = settings.get(self.theirs)
        limits = given if isinstance(given, list | tuple) else [given]
        if given is None:
            limits = [0.0, math.inf]
        # transformers 5 writes an infinite number as {"__float__": "Infinity"}.
        known = [math.inf if v == INFINITE else v for v in limits]
        numbers = [v for v in known if type(v) in (int, float)]
        if len(numbers) != 2 or not 0 <= numbers[0] < numbers[1] == math.inf:
            raise CheckpointError(
                f"{self.theirs} is {given!r}, and this package computes steps from a least one, 0 or more, without "
                "a largest"
            )
        return {"mamba_least_step": float(numbers[0])}

    def setting_of(self, model: ModelConfig) -> dict[str, Any]:
        """Return {time_step_limit: the two}."""
        return {self.theirs: [model.mamba_least_step, math.inf]}


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


# What entries of tables of Mamba-2 read beside their first settings, and what changes no output.
MAMBA_KEYS = frozenset(
    """
    expand mamba_expand mamba_chunk_size chunk_size num_logits_to_keep use_mamba_kernels layer_types
    time_step_rank time_step_min time_step_max time_step_floor rescale_prenorm_residual
    """.split()
)
# First values of gated delta nets.
OLMO_KEYS = frozenset(
    f"linear_{name}"
    for name in "a_log_min a_log_max dt_min dt_max dt_init_floor".split()
)
FALCON_H1_KEYS = MAMBA_KEYS | FACTORS.keys() | {"mamba_norm_before_gate"}
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
