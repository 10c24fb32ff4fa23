"""Settings of Mamba-2 in `config.json` of Hugging Face."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from ....config.options.model import ModelConfig
from ....errors import CheckpointError
from .mixer_settings import linear_options
from .rules import count_of_layers

Settings = Mapping[str, Any]
MAMBA = "mamba"
BESIDE = "mamba_beside_attention"
INFINITE = {"__float__": "Infinity"}
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
        attention = [i for i, kind in kinds if kind == "*"]
        return {self.theirs: attention}


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
        names = {
            "hidden_size": 0,
            self.heads: 128,
            self.expand: 2,
        }
        values: dict[str, Any] = {
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
class AllSideBySide:
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
        kinds = {*model.mixer_kinds}
        if kinds != {"+"}:
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
        return {
            self.theirs: kind != "none",
            self.order: kind != "gated",
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
            values: Any = given
            if given is None:
                values = [1.0] * count
            elif not isinstance(given, list | tuple):
                values = [given]
            if len(values) != count or not all(map(_is_factor, values)):
                raise CheckpointError(
                    f"{name} is {given!r}, and {count} numbers above 0 are needed"
                )
            found += map(float, values)
        return {"mixer_multipliers": tuple(found)}

    def setting_of(self, model: ModelConfig) -> dict[str, Any]:
        """Return their settings."""
        given = model.mixer_multipliers
        if given is None:
            given = (1.0,) * sum(FACTORS.values())
        values = iter(given)
        found: dict[str, Any] = {}
        for name, count in FACTORS.items():
            part = [*islice(values, count)]
            found[name] = part if count > 1 else part[0]
        return found


@dataclass(frozen=True)
class KeyFactor:
    """key_multiplier of Falcon-H1, a factor of keys and so of the scores."""

    theirs: str = "key_multiplier"

    def option_of(self, settings: Settings) -> dict[str, Any]:
        """Return {softmax_scale: value}; {} for the usual one. Raises CheckpointError."""
        value = settings.get(self.theirs, 1.0)
        heads: Any = settings.get("num_attention_heads")
        width: Any = settings.get("hidden_size")
        if any(type(size) is not int or size < 1 for size in (heads, width)):
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
        factor = scale * model.head_dim**0.5
        return {self.theirs: float(f"{factor:.14g}")}


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
        known: list[Any] = [math.inf if v == INFINITE else v for v in limits]
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


def _is_factor(value: object) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf  # type: ignore[operator]


# What entries of tables of Mamba-2 read beside their first settings, and what changes no output.
MAMBA_KEYS = frozenset(
    """
    expand mamba_expand mamba_chunk_size chunk_size num_logits_to_keep use_mamba_kernels layer_types
    time_step_rank time_step_min time_step_max time_step_floor rescale_prenorm_residual
    """.split()
)
FALCON_H1_KEYS = MAMBA_KEYS | FACTORS.keys() | {"mamba_norm_before_gate"}
