"""Sliding windows of Hugging Face: settings ↔ --window-size and --window-attn-skip-freq.

A window of W tokens there shows a token itself and the W - 1 before it, which is --window-size W-1,0 here.

    mistral, mixtral       sliding_window; null is none. All layers have it
    starcoder2             the same
    ministral              the same, and layer_types names the layers; if it is absent, all have it
    qwen3_moe              sliding_window, if use_sliding_window. All layers have it
    qwen2, qwen3           the same, and layer_types names the layers; if it is absent, those from
                           max_window_layers on
    gemma2                 sliding_window; layer_types names the layers; if it is absent, all but each second
    gemma3_text            the same; if layer_types is absent, all but each sixth
    qwen2_moe              that of qwen3_moe, and layer_types must be given: versions of transformers differ without it
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ....config.options.layer_pattern import MOST_LAYERS
from ....config.options.model import ModelConfig
from ....errors import CheckpointError

SLIDING = "sliding_attention"
FULL = "full_attention"
USUAL = 4096  # sliding_window where it is absent, but in mixtral
PATTERN = 6  # sliding_window_pattern where it is absent
FIRST = 28  # max_window_layers where it is absent
Settings = Mapping[str, Any]


def all_layers(settings: Settings, count: int) -> list[bool]:
    """Give each layer the window. Raises CheckpointError if layer_types has others: transformers ignores it in
    these models."""
    if listed := settings.get("layer_types"):
        if odd := sorted({*map(str, listed)} - {SLIDING}):
            raise CheckpointError(
                f"layer_types has {odd[0]!r}, but all layers of this model_type have the "
                f"window. Set it to {SLIDING!r} for all layers, or remove it"
            )
    return [True] * count


def layers_from_first(settings: Settings, count: int) -> list[bool]:
    """Return which layers have the window: by layer_types, else those from max_window_layers on. Raises
    CheckpointError."""
    if settings.get("layer_types") is not None:
        return listed_layers(settings, count)
    first = settings.get("max_window_layers", FIRST)
    if type(first) is not int:
        raise CheckpointError(f"max_window_layers is {first!r}, not a number of layers")
    return [i >= first for i in range(count)]


def layers_or_all(settings: Settings, count: int) -> list[bool]:
    """Return which layers have the window: by layer_types, else all. Raises CheckpointError."""
    if settings.get("layer_types") is not None:
        return listed_layers(settings, count)
    return [True] * count


def listed_layers(settings: Settings, count: int) -> list[bool]:
    """Return which layers have the window, by layer_types. Raises CheckpointError."""
    listed = settings.get("layer_types")
    if (
        not isinstance(listed, list)
        or len(listed) != count
        or {*map(str, listed)} - {SLIDING, FULL}
    ):
        raise CheckpointError(
            f"layer_types is {listed!r}, and with use_sliding_window it must name "
            f"{SLIDING!r} or {FULL!r} for each of {count} layers"
        )
    return [kind == SLIDING for kind in listed]


def layers_by_pattern(settings: Settings, count: int) -> list[bool]:
    """Return which layers have the window: by layer_types, else all but every N-th, N being sliding_window_pattern
    or 6. Raises CheckpointError."""
    if settings.get("layer_types") is not None:
        return listed_layers(settings, count)
    every = settings.get("sliding_window_pattern") or PATTERN
    if type(every) is not int or every < 1:
        raise CheckpointError(
            f"sliding_window_pattern is {every!r}, not a number of layers"
        )
    return [bool((i + 1) % every) for i in range(count)]


@dataclass(frozen=True)
class Window:
    """The entry of windows in a table of settings.

    default      sliding_window where it is absent
    has_switch   whether use_sliding_window must be true
    layers       function(settings, number of layers) -> which layers have the window
    hides        whether a window that hides no token is left out; transformers needs one in other families
    """

    default: int | None = USUAL
    has_switch: bool = True
    layers: Callable[[Settings, int], list[bool]] = all_layers
    hides: bool = True
    theirs: str = "sliding_window"

    def option_of(self, settings: Settings) -> dict[str, Any]:
        """Return our two options; {} where no window hides a token. Raises CheckpointError."""
        # Without a window no layer may ask for one.
        window = settings.get(self.theirs, self.default)
        if (
            self.has_switch
            and not settings.get("use_sliding_window", False)
            or window is None
        ):
            if SLIDING in (settings.get("layer_types") or ()):
                keys = "sliding_window"
                if self.has_switch:
                    keys += " and use_sliding_window"
                raise CheckpointError(
                    f"layer_types has {SLIDING!r}, but no window is set. Set {keys}, or "
                    "remove layer_types"
                )
            return {}
        if type(window) is not int or window < 2:
            raise CheckpointError(
                f"sliding_window is {window!r}, not a number of tokens from 2 up"
            )
        # The length and the layers decide whether any window hides a token.
        count = settings.get("num_hidden_layers")
        positions = settings.get("max_position_embeddings")
        if (
            type(count) is not int
            or not 0 < count <= MOST_LAYERS
            or type(positions) is not int
        ):
            return {}  # other entries of the table report these settings
        windowed = self.layers(settings, count)
        if self.hides and window >= positions or not any(windowed):
            return {}
        frequency = skip_frequency(windowed)
        return {"window_size": (window - 1, 0)} | (
            {"window_attn_skip_freq": frequency} if frequency else {}
        )

    def setting_of(self, model: ModelConfig) -> dict[str, Any]:
        """Return their settings."""
        windowed = model.windowed
        value = None if self.hides else model.positions
        if model.window_size is not None and any(windowed):
            value = model.window_size[0] + 1
        found: dict[str, Any] = {self.theirs: value}
        if self.has_switch:
            found["use_sliding_window"] = any(windowed)
        if self.layers is not all_layers:
            found["layer_types"] = [
                SLIDING if has_window else FULL for has_window in windowed
            ]
            if any(windowed):  # earlier versions of transformers read this one alone
                found["max_window_layers"] = windowed.index(True)
        return found


def skip_frequency(windowed: list[bool] | tuple[bool, ...]) -> str | None:
    """--window-attn-skip-freq of layers with a window: N if each Nth lacks it, else a list; None if all have
    it."""
    if all(windowed):
        return None
    every = [*windowed].index(False) + 1
    if all(
        has_window == bool((i + 1) % every) for i, has_window in enumerate(windowed)
    ):
        return str(every)
    return str([int(has_window) for has_window in windowed])
