"""--hybrid-layer-pattern of Megatron's pretrain_hybrid.py → the options of a GPT here.

A pattern that alternates attention and a feed-forward, or experts, is a GPT with half as many layers: Megatron
spells a plain GPT so since it deprecated its GPTModel. Other patterns are refused, with the first half that a GPT does
not have.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from ...config.run import RunConfig
from ...config.sources.reading import Deferred, Setting
from ...errors import ConfigError
from .layer_halves import (
    ATTENTION,
    EXPERTS,
    FEED_FORWARD,
    Half,
    PatternHalves,
    read_halves,
)
from .word_readers import deferred, settings_of, word_of


@dataclass(frozen=True)
class LayerCount(Deferred):
    """The layers of a pattern. Megatron ignores --num-layers beside it, which counts the halves there."""

    layers: int

    def of(self, config: RunConfig) -> int:
        """Return the number of layers."""
        return self.layers


@dataclass(frozen=True)
class ExpertLayers(Deferred):
    """Which layers of a pattern have experts, of a model with experts."""

    layers: tuple[bool, ...]

    def of(self, config: RunConfig) -> str | None:
        """Return the list of --moe-layer-freq; None for a dense model."""
        if config.model.num_experts is None:
            return None
        return f"[{','.join(str(int(has)) for has in self.layers)}]"


def settings_of_pattern(words: Sequence[str], flag: str) -> list[Setting]:
    """Return the settings of a pattern that is a GPT. Raises ConfigError for another one."""
    pattern = word_of(words, flag, "a pattern such as *-*-")
    halves = read_halves(pattern, flag)
    if halves.further_tokens:
        raise ConfigError(
            f"{flag} {pattern[:60]}: predicting more than the next token is not available. Remove what follows the "
            "first /."
        )
    experts = tuple(_experts_of_layers(halves, flag))
    found = [
        deferred(flag, "--num-layers", LayerCount(len(experts))),
        deferred(flag, "--moe-layer-freq", ExpertLayers(experts)),
    ]
    if halves.segments > 1:
        found += settings_of(flag, ["--pipeline-layout", _layout(halves)])
    return found


def _experts_of_layers(halves: PatternHalves, flag: str) -> Iterator[bool]:
    """Yield whether each layer has experts. Raises ConfigError for a half that is not its half of a GPT's layer."""
    for i, half in enumerate(halves.main):
        is_second = i % 2 == 1
        if half.kind not in ((FEED_FORWARD, EXPERTS) if is_second else (ATTENTION,)):
            raise ConfigError(_not_a_gpt(half, i, flag))
        if is_second and half.segment != halves.main[i - 1].segment:
            raise ConfigError(
                f"{flag}: half {i + 1} begins a pipeline stage, and layers are not cut in two. Put | before an attention."
            )
        if is_second:
            yield half.kind == EXPERTS
    if len(halves.main) % 2:
        raise ConfigError(
            f"{flag} ends with an attention that no feed-forward follows: layers have both halves. Add - or E."
        )


def _not_a_gpt(half: Half, i: int, flag: str) -> str:
    known = (ATTENTION, FEED_FORWARD, EXPERTS)
    if half.kind not in known:
        why = f"is {half.kind}, which is not available"
    else:
        wanted = "a feed-forward or experts" if i % 2 else "attention"
        why = f"is {half.kind} where a layer has {wanted}: layers of one half are not available"
    return (
        f"{flag}: half {i + 1} {why}. A pattern here alternates attention (*) and a feed-forward (-) or experts (E), "
        "such as *-*-*E."
    )


def _layout(halves: PatternHalves) -> str:
    """Return the layers of each stage as --pipeline-layout has them. A stage may be empty."""
    counts = dict.fromkeys(range(halves.segments), 0)
    for segment, members in groupby(halves.main, lambda half: half.segment):
        counts[segment] = len(list(members)) // 2
    return ",".join(map(str, counts.values()))
