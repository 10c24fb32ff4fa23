"""--hybrid-layer-pattern of Megatron's pretrain_hybrid.py → the options of a GPT here.

A pattern that alternates attention and a feed-forward, or experts, is a GPT with half as many layers: Megatron
spells a plain GPT so since it deprecated its GPTModel. Another pattern of halves that exist here is --mixer-pattern,
whose layers are the halves. The rest is refused, with the first half that is not available.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from ...config.run import RunConfig
from ...config.sources.reading import Deferred, Setting
from ...errors import ConfigError
from .layer_halves import (
    ATTENTION,
    EXPERTS,
    FEED_FORWARD,
    HALVES,
    PatternHalves,
    read_halves,
)
from .word_readers import deferred, settings_of, word_of

# What a half computes → its letter, of those that models here can have.
AVAILABLE = {kind: letter for letter, kind in HALVES.items() if letter in "*-EMG"}


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
    """Return the settings of a pattern. Raises ConfigError for halves that are not available."""
    pattern = word_of(words, flag, "a pattern such as *-*-")
    halves = read_halves(pattern, flag)
    if halves.further_tokens:
        raise ConfigError(
            f"{flag} {pattern[:60]}: predicting more than the next token is not available. Remove what follows the "
            "first /."
        )
    if not _is_gpt(halves):
        return _settings_of_halves(halves, flag)
    seconds = halves.main[1::2]
    experts = tuple(half.kind == EXPERTS for half in seconds)
    found = [
        deferred(flag, "--num-layers", LayerCount(len(experts))),
        deferred(flag, "--moe-layer-freq", ExpertLayers(experts)),
    ]
    if halves.segments > 1:
        found += settings_of(flag, ["--pipeline-layout", _layout(halves, 2)])
    return found


def _is_gpt(halves: PatternHalves) -> bool:
    """Return whether halves are those of whole layers, of which no pipeline stage has a part."""
    firsts = halves.main[::2]
    seconds = halves.main[1::2]
    if len(firsts) != len(seconds):
        return False
    return all(
        first.kind == ATTENTION
        and second.kind in (FEED_FORWARD, EXPERTS)
        and first.segment == second.segment
        for first, second in zip(firsts, seconds, strict=True)
    )


def _settings_of_halves(halves: PatternHalves, flag: str) -> list[Setting]:
    """Return the settings of a model whose layers are halves. Raises ConfigError for one that is not available."""
    for i, half in enumerate(halves.main):
        if half.kind not in AVAILABLE:
            raise ConfigError(
                f"{flag}: half {i + 1} is {half.kind}, which is not available. Use {', '.join(AVAILABLE.values())}."
            )
    pattern = "".join(AVAILABLE[half.kind] for half in halves.main)
    found = [
        deferred(flag, "--num-layers", LayerCount(len(pattern))),
        *settings_of(flag, ["--mixer-pattern", pattern]),
    ]
    if halves.segments > 1:
        found += settings_of(flag, ["--pipeline-layout", _layout(halves, 1)])
    return found


def _layout(halves: PatternHalves, of_layer: int) -> str:
    """Return the layers of each stage as --pipeline-layout has them. A stage may be empty. of_layer: its halves"""
    counts = dict.fromkeys(range(halves.segments), 0)
    for segment, members in groupby(halves.main, lambda half: half.segment):
        counts[segment] = len(list(members)) // of_layer
    return ",".join(map(str, counts.values()))
