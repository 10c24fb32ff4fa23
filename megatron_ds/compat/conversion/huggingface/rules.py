"""Entries of tables of settings (`settings_table.py`) whose options follow from several settings, or from one by
a formula."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from ....config.options.layer_pattern import MOST_LAYERS
from ....config.options.model import ModelConfig
from ....errors import CheckpointError
from .rotary import THETA, rotary_options, rotary_settings
from .windows import USUAL, layers_by_pattern

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Derived:
    """An option that follows from a setting whose own option another entry sets.

    value function(the setting) -> the option
    """

    theirs: str
    ours: str
    value: Callable[[Any], Any]

    def option_of(self, settings: Settings) -> dict[str, Any]:
        """Return {our option: value}; {} where the setting is no number, which the other entry reports."""
        given = settings.get(self.theirs)
        return {self.ours: self.value(given)} if type(given) is int else {}

    def setting_of(self, model: ModelConfig) -> dict[str, Any]:
        """Return {}."""
        return {}


def count_of_layers(settings: Settings) -> int | None:
    """Return the number of layers of a folder; None where the setting is no such number."""
    count = settings.get("num_hidden_layers")
    if type(count) is not int or not 0 < count <= MOST_LAYERS:
        return None
    return count


def ends_of_intervals(settings: Settings, name: str, count: int) -> list[bool]:
    """Return whether each of `count` layers is the last of an interval, by the setting `name`, 4 by default.

    Raises CheckpointError for a setting that is no number of layers.
    """
    every = settings.get(name, 4)
    if type(every) is not int or every < 1:
        raise CheckpointError(f"{name} is {every!r}, not a number of layers")
    return [(i + 1) % every == 0 for i in range(count)]


@dataclass(frozen=True)
class EmbeddingDropout:
    """The setting embd_pdrop. Embeddings have the same dropout as the residuals here, resid_pdrop.

    default of both; residual: the setting of the residuals
    """

    default: float
    theirs: str = "embd_pdrop"
    residual: str = "resid_pdrop"

    def option_of(self, settings: Settings) -> dict[str, Any]:
        """Return {}: the entry of the residuals sets the option."""
        return {}

    def setting_of(self, model: ModelConfig) -> dict[str, Any]:
        """Return {their setting: rate}."""
        return {self.theirs: model.hidden_dropout}

    def note_of(self, settings: Settings) -> str:
        """Return a sentence if the two settings differ; "" if they are equal."""
        own, others = (
            self.default if settings.get(name) is None else settings[name]
            for name in (self.theirs, self.residual)
        )
        if own == others:
            return ""
        return (
            f"{self.theirs} {own} is not followed: --hidden-dropout, which is {self.residual} {others} unless it is "
            "given, is applied to the embeddings too"
        )


@dataclass(frozen=True)
class MultiQuery:
    """The setting multi_query of GPT-BigCode: one key and value for all queries, or one for each."""

    theirs: str = "multi_query"

    def option_of(self, settings: Settings) -> dict[str, Any]:
        """Return {num_query_groups: 1}; {} for a key for each query."""
        return {"num_query_groups": 1} if settings.get(self.theirs, True) else {}

    def setting_of(self, model: ModelConfig) -> dict[str, Any]:
        """Return {multi_query: whether there is one group}."""
        return {self.theirs: model.query_groups == 1}


@dataclass(frozen=True)
class RotaryDim:
    """rotary_dim of GPT-J: the number of channels of each head that are rotated, as neighbouring pairs."""

    theirs: str = "rotary_dim"

    def option_of(self, settings: Settings) -> dict[str, Any]:
        """Return our options of rotary positions. Raises CheckpointError."""
        dim = settings.get(self.theirs)
        heads = settings.get("n_head")
        width = settings.get("n_embd")
        if not (_is_size(heads) and _is_size(width)):
            return {}  # other entries of the table report these settings
        if type(dim) is not int or not 0 < dim <= width // heads or dim % 2:
            raise CheckpointError(
                f"rotary_dim is {dim!r}, not an even number of channels up to {width // heads}, "
                "the width of a head"
            )
        return {
            "position_embedding_type": "rope",
            "rotary_interleaved": True,
            "rotary_percent": dim / (width // heads),
        }

    def setting_of(self, model: ModelConfig) -> dict[str, Any]:
        """Return {rotary_dim: channels}."""
        return {self.theirs: round(model.rotary_percent * model.head_dim)}


@dataclass(frozen=True)
class FalconBlock:
    """new_decoder_architecture, multi_query, parallel_attn and num_ln_in_parallel_attn of Falcon.

    new (40B, 180B)         groups of heads; attention and feed-forward at once, with a norm each or one for both
    multi_query (7B)        one group; at once with one norm for both, or one after the other
    neither                 a key for each query; the same two
    """

    theirs: str = "new_decoder_architecture"

    def option_of(self, settings: Settings) -> dict[str, Any]:
        """Return our options of groups, residual and norms. Raises CheckpointError."""
        is_new = bool(settings.get(self.theirs))
        is_parallel = bool(settings.get("parallel_attn", True))
        norms = settings.get("num_ln_in_parallel_attn") or (2 if is_new else 1)
        if (
            norms not in (1, 2)
            or norms == 2
            and not is_new
            or is_new
            and not is_parallel
        ):
            raise CheckpointError(
                f"{self.theirs} is {is_new}, parallel_attn {is_parallel} and num_ln_in_parallel_attn "
                f"{norms}: Falcon has no such block"
            )
        groups = settings.get("num_attention_heads")
        if is_new:
            groups = settings.get("num_kv_heads") or groups
        elif settings.get("multi_query", True):
            groups = 1
        return {
            "num_query_groups": groups,
            "use_parallel_residual": is_parallel,
            "shared_block_norm": is_parallel and norms == 1,
        }

    def setting_of(self, model: ModelConfig) -> dict[str, Any]:
        """Return their settings."""
        is_parallel = model.use_parallel_residual
        is_shared = is_parallel and model.shared_block_norm
        is_single = model.query_groups == 1
        is_new = is_parallel and not (is_shared and is_single)
        return {
            self.theirs: is_new,
            "parallel_attn": is_parallel,
            "multi_query": is_single,
            "num_kv_heads": model.query_groups,
            "num_ln_in_parallel_attn": 2 - is_shared if is_new else None,
        }


FALCON_KEYS = frozenset(
    "parallel_attn multi_query num_kv_heads num_ln_in_parallel_attn".split()
)
# Values of attn_config of MPT that are computed; the first is written.
MPT_ATTENTION = {
    "attn_type": ("multihead_attention",),
    "alibi": (True,),
    "alibi_bias_max": (8,),
    "clip_qkv": (None,),
    "prefix_lm": (False,),
    "qk_ln": (False,),
    "attn_uses_sequence_id": (False,),
}


@dataclass(frozen=True)
class MptAttention:
    """attn_config of MPT: ALiBi, the scale of scores, and the dropout of all parts of a block."""

    theirs: str = "attn_config"

    def option_of(self, settings: Settings) -> dict[str, Any]:
        """Return our options. Raises CheckpointError for attention that is not computed."""
        given = settings.get(self.theirs) or {}
        for name, values in MPT_ATTENTION.items():
            if (value := given.get(name, values[0])) not in values:
                raise CheckpointError(
                    f"{self.theirs} has {name} {value!r}, and this package computes {values[0]!r} only"
                )
        heads = settings.get("n_heads")
        if type(heads) is int and heads & (heads - 1):
            raise CheckpointError(
                f"n_heads is {heads}: the slopes of MPT's ALiBi have another order than those of BLOOM, "
                "which are computed here, unless the heads are a power of two"
            )
        dropout = given.get("attn_pdrop", 0.0)
        scale = given.get("softmax_scale")
        return {
            "position_embedding_type": "alibi",
            **({} if scale is None else {"softmax_scale": scale}),
            "attention_dropout": dropout,
            "hidden_dropout": dropout,
        }

    def setting_of(self, model: ModelConfig) -> dict[str, Any]:
        """Return {attn_config: values}."""
        fixed = {name: values[0] for name, values in MPT_ATTENTION.items()}
        own = {
            "softmax_scale": model.softmax_scale,
            "attn_pdrop": model.attention_dropout
            or 0,  # transformers takes a whole number
        }
        return {self.theirs: fixed | own}


@dataclass(frozen=True)
class Multiplier:
    """A factor, or with `divides` a divisor, that is a number above 0.

    absent: their value where the setting is absent
    """

    theirs: str
    ours: str
    absent: float = 1.0
    divides: bool = False

    def option_of(self, settings: Settings) -> dict[str, Any]:
        """Return {our option: factor}. Raises CheckpointError."""
        value = settings.get(self.theirs)
        if value is None:
            value = self.absent
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not 0 < value < math.inf
        ):
            raise CheckpointError(f"{self.theirs} is {value!r}, not a number above 0")
        return {self.ours: 1 / value if self.divides else float(value)}

    def setting_of(self, model: ModelConfig) -> dict[str, Any]:
        """Return {their setting: number}; the reciprocal of a reciprocal is written as it was."""
        value = getattr(model, self.ours)
        if not self.divides:
            return {self.theirs: value}
        return {self.theirs: float(f"{1 / value:.15g}")}


@dataclass(frozen=True)
class ScoreScale:
    """The setting attention_multiplier of Granite, which scores are multiplied by."""

    theirs: str = "attention_multiplier"

    def option_of(self, settings: Settings) -> dict[str, Any]:
        """Return {softmax_scale: value}. Raises CheckpointError."""
        return Multiplier(self.theirs, "softmax_scale").option_of(settings)

    def setting_of(self, model: ModelConfig) -> dict[str, Any]:
        """Return {attention_multiplier: number}."""
        scale = model.softmax_scale
        return {self.theirs: model.head_dim**-0.5 if scale is None else scale}


@dataclass(frozen=True)
class UnrotatedListed:
    """no_rope_layers of SmolLM3, 1 for each layer with rotary positions; if it is absent, all but every N-th have
    them, N being no_rope_layer_interval."""

    theirs: str = "no_rope_layers"

    def option_of(self, settings: Settings) -> dict[str, Any]:
        """Return {no_rope_freq: layers}; {} where all are rotated. Raises CheckpointError."""
        count = count_of_layers(settings)
        if count is None:
            return {}  # another entry of the table reports it
        rotated = settings.get(self.theirs)
        if rotated is None:
            ends = ends_of_intervals(settings, "no_rope_layer_interval", count)
            rotated = [int(not is_end) for is_end in ends]
        if (
            not isinstance(rotated, list)
            or len(rotated) != count
            or any(value not in (0, 1) for value in rotated)
        ):
            raise CheckpointError(
                f"{self.theirs} is {rotated!r}, not 1 or 0 for each of {count} layers"
            )
        return unrotated_option([not value for value in rotated])

    def setting_of(self, model: ModelConfig) -> dict[str, Any]:
        """Return {no_rope_layers: list}."""
        return {self.theirs: [int(not unrotated) for unrotated in model.unrotated]}


@dataclass(frozen=True)
class UnrotatedWithoutWindow:
    """The layers without rotary positions of Cohere 2, which are those without a window."""

    theirs: str = "layer_types"

    def option_of(self, settings: Settings) -> dict[str, Any]:
        """Return {no_rope_freq: layers}; {} where all have a window. Raises CheckpointError."""
        count = count_of_layers(settings)
        if count is None:
            return {}  # another entry of the table reports it
        if settings.get("sliding_window", USUAL) is None:
            raise CheckpointError(
                "sliding_window is None, and a model without positions in any layer is not read"
            )
        return unrotated_option(
            [not has_window for has_window in layers_by_pattern(settings, count)]
        )

    def setting_of(self, model: ModelConfig) -> dict[str, Any]:
        """Return {}: the entry of windows writes layer_types."""
        return {}


def unrotated_option(unrotated: Sequence[bool]) -> dict[str, Any]:
    """Return {no_rope_freq: N or a list}; {} where all layers are rotated. Raises CheckpointError."""
    if all(unrotated):
        raise CheckpointError("no layer has rotary positions")
    if not any(unrotated):
        return {}
    return {"no_rope_freq": layer_frequency(unrotated)}


def layer_frequency(chosen: Sequence[bool]) -> str:
    """Return N if each Nth layer is chosen and no other, else a list."""
    every = [*chosen].index(True) + 1
    if all(is_in == ((i + 1) % every == 0) for i, is_in in enumerate(chosen)):
        return str(every)
    return str([int(is_in) for is_in in chosen])


@dataclass(frozen=True)
class QueryScalar:
    """The setting query_pre_attn_scalar of Gemma, by whose root scores are divided. head_dim, the usual value,
    needs no option."""

    theirs: str = "query_pre_attn_scalar"

    def option_of(self, settings: Settings) -> dict[str, Any]:
        """Return {softmax_scale: value}; {} for the usual one. Raises CheckpointError."""
        scalar = settings.get(self.theirs)
        if (
            isinstance(scalar, bool)
            or not isinstance(scalar, int | float)
            or scalar <= 0
        ):
            raise CheckpointError(f"{self.theirs} is {scalar!r}, not a number above 0")
        is_usual = scalar == settings.get("head_dim")
        return {} if is_usual else {"softmax_scale": scalar**-0.5}

    def setting_of(self, model: ModelConfig) -> dict[str, Any]:
        """Return {query_pre_attn_scalar: number}, whole where it is nearly."""
        scalar: float = model.head_dim
        if model.softmax_scale is not None:
            scalar = model.softmax_scale**-2
        is_whole = abs(scalar - round(scalar)) < 1e-6 * scalar
        return {self.theirs: round(scalar) if is_whole else scalar}


def _is_size(value: object) -> TypeGuard[int]:
    return type(value) is int and value > 0


WINDOW_THETA = "rope_local_base_freq"
BY_WINDOW_KEYS = frozenset((WINDOW_THETA, "sliding_window_pattern"))


@dataclass(frozen=True)
class RotaryByWindow:
    """Rotary positions of Gemma 3, which have another base in layers with a window.

    transformers 5    rope_parameters {full_attention {…}, sliding_attention {…}}
    transformers 4    rope_theta, rope_scaling, rope_local_base_freq
    """

    theirs: str = "rope_parameters"

    def option_of(self, settings: Settings) -> dict[str, Any]:
        """Return our options of both. Raises CheckpointError."""
        both = settings.get(self.theirs) or {}
        inside = dict(both.get("sliding_attention") or {})
        if inside.get("rope_type", "default") != "default":
            raise CheckpointError(
                f"rope_type of sliding_attention is {inside['rope_type']!r}, and this package scales "
                "rotary positions in layers without a window only"
            )
        outside = dict(both.get("full_attention") or {})
        outside |= settings.get("rope_scaling") or {}
        usual = {THETA: settings.get(THETA, 1e6)}
        alone = {**settings, self.theirs: usual | outside, "rope_scaling": None}
        base = inside.get(THETA, settings.get(WINDOW_THETA, 1e4))
        if not isinstance(base, int | float):
            raise CheckpointError(
                f"{THETA} of sliding_attention is {base!r}, not a number"
            )
        return {
            "position_embedding_type": "rope",
            **rotary_options(alone, {}),
            "window_rotary_base": float(base),
        }

    def setting_of(self, model: ModelConfig) -> dict[str, Any]:
        """Return their settings in both spellings."""
        found = rotary_settings(model, is_partial=False)
        base = model.window_rotary_base or model.rotary_base
        windowed = {"rope_type": "default", THETA: base}
        both = {
            "full_attention": found[self.theirs],
            "sliding_attention": windowed,
        }
        return found | {self.theirs: both, WINDOW_THETA: base}
