"""`AttentionOptions`: the part of `ModelConfig` about the keys that a query sees, and their softmax."""

from dataclasses import dataclass

from ...errors import ConfigError
from .layer_pattern import read_layer_pattern
from .need import need
from .option import option

SOFTMAX_TYPES = ("vanilla", "off-by-one", "learnable")


@dataclass(frozen=True)
class AttentionOptions:
    """Windows and the softmax. Names are Megatron's."""

    window_size: tuple[int, ...] | None = option(
        None,
        at_least=-1,
        least="which is no limit",
        count=2,
        example="127,0",
        separators="(,)",
        unit="tokens",
        help="Sliding window: a token attends to LEFT tokens before and RIGHT tokens after it, such as "
        "127,0; -1 is all of them. Default: no window.",
        avoid="Models that generate text (GPT) need 0 on the right.",
    )
    window_attn_skip_freq: str | None = option(
        None,
        strip="\"'",
        needs=need("model.window_size"),
        help="Which layers have no window: N for every Nth layer; or a list with 1 for each layer with the "
        "window and 0 for each without, such as ([1]*3+[0])*6. Default: all layers have it.",
        avoid="In YAML, put a list in quotes.",
    )
    no_rope_freq: str | None = option(
        None,
        strip="\"'",
        needs=need("model.position_embedding_type", "rope", "yarn"),
        help="Which layers rotate neither queries nor keys: N for every Nth layer; or a list with 1 for each layer "
        "without positions and 0 for each with them, such as ([0]*3+[1])*9 (SmolLM3, Command R7B). Default: all "
        "layers have positions.",
        avoid="In YAML, put a list in quotes.",
    )
    softmax_type: str = option(
        "vanilla",
        choices=SOFTMAX_TYPES,
        help="off-by-one: attention probabilities are exp(s) / (1 + Σ exp(s)), so that a head may attend to "
        "nothing; learnable: each head has a weight in place of the exponent of 1 (attention sinks).",
        avoid="On GPUs both compute attention without the fused kernels.",
    )

    softmax_scale: float | None = option(
        None,
        above=0,
        help="Factor of the scores of attention, the products of queries and keys. Default: "
        "1 / √(width of a head).",
        avoid="It is for models that were trained so.",
    )
    attention_logit_softcapping: float | None = option(
        None,
        above=0,
        help="C: the scores of attention become C tanh(scores / C) before the softmax (50 in Gemma 2).",
        avoid="It is for models that were trained so. On GPUs without Triton, and on CPUs, attention is computed "
        "without the fused kernels.",
    )
    window_rotary_base: float | None = option(
        None,
        above=0,
        needs=need("model.window_size"),
        help="Base of the rotary angles in layers with a window, whose angles are not scaled (Gemma 3). "
        "Default: that of all layers.",
        avoid="It is for models that were trained so.",
    )

    def windowed_layers(self, num_layers: int) -> tuple[bool, ...]:
        """Return whether each layer has the window. Raises ConfigError."""
        if self.window_size is None or self.window_attn_skip_freq is None:
            return (self.window_size is not None,) * num_layers
        flag = "--window-attn-skip-freq"
        pattern = read_layer_pattern(self.window_attn_skip_freq, flag)
        if isinstance(pattern, int):
            return tuple((i + 1) % pattern != 0 for i in range(num_layers))
        return _of_each_layer(pattern, num_layers, flag)

    def unrotated_layers(self, num_layers: int) -> tuple[bool, ...]:
        """Return whether each layer is without rotary positions, of a model that has them. Raises ConfigError."""
        if self.no_rope_freq is None:
            return (False,) * num_layers
        flag = "--no-rope-freq"
        pattern = read_layer_pattern(self.no_rope_freq, flag)
        if isinstance(pattern, int):
            return tuple((i + 1) % pattern == 0 for i in range(num_layers))
        return _of_each_layer(pattern, num_layers, flag)


def _of_each_layer(pattern: list[int], num_layers: int, flag: str) -> tuple[bool, ...]:
    if len(pattern) != num_layers:
        raise ConfigError(
            f"{flag} describes {len(pattern)} layers, but the model has {num_layers}. "
            "Give one entry for each layer."
        )
    return tuple(map(bool, pattern))
