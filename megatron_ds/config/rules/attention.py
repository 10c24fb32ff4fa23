"""Rules about which keys a query sees."""

from collections.abc import Iterator

from ..messages import flag
from ..model_facts import facts_of_model
from ..run import RunConfig


def windows(config: RunConfig) -> Iterator[str]:
    """A window hides something, nothing of it lies in the future of a causal model, and a layer has it."""
    # Options of a window need one.
    model = config.model
    window = config.model.window_size
    if window is None:
        return
    # The window hides some tokens, but not all, and shows none of the future.
    left, right = window
    is_causal = facts_of_model(model.model).is_causal
    if is_causal and right > 0:
        yield (
            f"[window_size] shows {right} later tokens, but a causal model sees none. Use --window-size "
            f"{left},0."
        )
    if left == right == 0 or left == 0 and is_causal:
        yield (
            "[window_size] shows each token itself alone. Use --window-size LEFT,RIGHT with the number of "
            "tokens before and after it, such as 127,0."
        )
    if left == -1 and (is_causal or right == -1):
        yield (
            "[window_size] hides nothing: -1 is no limit. Remove it, or give the number of earlier tokens "
            "that a token attends to, such as --window-size 127,0."
        )
    # A layer has it.
    # `windowed_layers` raises if the frequency does not fit.
    if model.num_layers and not any(model.windowed_layers(model.num_layers)):
        yield (
            "[window_attn_skip_freq] leaves no layer with the window. Remove --window-size, or use "
            f"{flag('model.window_attn_skip_freq')} 2 or more."
        )


def layers_without_positions(config: RunConfig) -> Iterator[str]:
    """Report a list of layers that does not fit, as ConfigError, and one of all layers."""
    model = config.model
    if model.num_layers and all(model.unrotated_layers(model.num_layers)):
        yield (
            "[no_rope_freq] leaves no layer with positions. Use --position-embedding-type none, or "
            f"{flag('model.no_rope_freq')} 2 or more."
        )


ATTENTION_RULES = (windows, layers_without_positions)
