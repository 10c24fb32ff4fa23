"""What each layer of a hybrid model is, by its options. Pure."""

from typing import Any

from ...config.options.layer_pattern import read_layer_pattern
from ...errors import ConfigError
from .letters import ATTENTION, DELTA, EXPERTS, FEED_FORWARD, MAMBA, STATES

NOUNS = {
    MAMBA: "Mamba-2",
    DELTA: "gated delta net",
    ATTENTION: "attention",
    FEED_FORWARD: "feed-forward",
    EXPERTS: "experts",
}


def halves_of(config: Any) -> str:
    """Return the character of each layer of a pattern, a model's options. Raises ConfigError."""
    pattern = config.mixer_pattern
    flag = "--mixer-pattern"
    unknown = sorted(set(pattern) - set(NOUNS))
    if unknown:
        known = ", ".join(f"{letter} {noun}" for letter, noun in NOUNS.items())
        raise ConfigError(
            f"{flag} {pattern!r} has {' '.join(unknown)!r}, which names no layer. Use {known}."
        )
    if len(pattern) != config.num_layers:
        raise ConfigError(
            f"{flag} describes {len(pattern)} layers, but the model has {config.num_layers}. Each character is a "
            f"layer: use --num-layers {len(pattern)}, or another pattern."
        )
    return pattern


def kinds_of(config: Any) -> str:
    """Return the character of each layer; those of whole blocks name what mixes their tokens. Raises ConfigError."""
    if config.mixer_pattern is not None:
        return halves_of(config)
    layers = config.num_layers
    if config.linear_attention_freq is None:
        return ATTENTION * layers
    state = STATES[config.linear_attention_type]
    flag = "--linear-attention-freq"
    pattern = read_layer_pattern(config.linear_attention_freq, flag)
    if isinstance(pattern, int):
        pattern = [int((i + 1) % pattern != 0) for i in range(layers)]
    if len(pattern) != layers:
        raise ConfigError(
            f"{flag} describes {len(pattern)} layers, but the model has {layers}. Give one entry for each layer."
        )
    return "".join(state if has_state else ATTENTION for has_state in pattern)
