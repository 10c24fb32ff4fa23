"""What each layer of a hybrid model is, by its options. Pure."""

from ...config.options.layer_pattern import read_layer_pattern
from ...config.options.model import ModelConfig
from ...errors import ConfigError

MAMBA = "M"
DELTA = "G"
ATTENTION = "*"
FEED_FORWARD = "-"
EXPERTS = "E"
NOUNS = {
    MAMBA: "Mamba-2",
    DELTA: "gated delta net",
    ATTENTION: "attention",
    FEED_FORWARD: "feed-forward",
    EXPERTS: "experts",
}


def halves_of(config: ModelConfig) -> str:
    """Return the character of each layer; "" where layers are whole blocks. Raises ConfigError."""
    pattern = config.hybrid_layer_pattern
    if pattern is None:
        return ""
    flag = "--hybrid-layer-pattern"
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


def has_delta_net(config: ModelConfig) -> tuple[bool, ...]:
    """Return whether each block has a gated delta net in place of attention. Raises ConfigError."""
    layers = config.num_layers
    if config.linear_attention_freq is None:
        return (False,) * layers
    flag = "--linear-attention-freq"
    pattern = read_layer_pattern(config.linear_attention_freq, flag)
    if isinstance(pattern, int):
        return tuple((i + 1) % pattern != 0 for i in range(layers))
    if len(pattern) != layers:
        raise ConfigError(
            f"{flag} describes {len(pattern)} layers, but the model has {layers}. Give one entry for each layer."
        )
    return tuple(map(bool, pattern))
