"""A pattern of Megatron's hybrid models → the halves of its layers.

    *-*-|*-*E/*-     attention, feed-forward, …; | ends the part of a pipeline stage, / precedes the layers that
                     predict further tokens

Each letter is one half of a block: what mixes tokens, or what treats each token alone. This module knows the
letters, and not which of them a model here can have.
"""

from dataclasses import dataclass

from ...errors import ConfigError

ATTENTION = "attention"
FEED_FORWARD = "feed-forward"
EXPERTS = "experts"
# Letter → what the half computes.
HALVES = {
    "*": ATTENTION,
    "-": FEED_FORWARD,
    "E": EXPERTS,
    "M": "Mamba",
    "G": "gated delta net",
    "D": "sparse attention (DSA)",
    "+": "multi-latent attention",
}
STAGE = "|"
FURTHER_TOKENS = "/"
MOST_HALVES = 20_000


@dataclass(frozen=True)
class Half:
    """One half of a block. kind: a value of `HALVES`; segment: number of its part of the pipeline, from 0."""

    kind: str
    segment: int = 0


@dataclass(frozen=True)
class PatternHalves:
    """The halves of a pattern, in order.

    segments        parts that | separates, 1 without any
    further_tokens  patterns after the main one, each of a further token that is predicted
    """

    main: tuple[Half, ...]
    segments: int = 1
    further_tokens: tuple[str, ...] = ()


def read_halves(pattern: str, flag: str) -> PatternHalves:
    """Return the halves of a pattern. Raises ConfigError for a letter that no pattern has, with the flag."""
    main, *further = pattern.split(FURTHER_TOKENS)
    if not main.strip(STAGE) or len(pattern) > MOST_HALVES:
        raise ConfigError(
            f"{flag} has {len(pattern)} letters: it needs one for each half of a layer, and at most {MOST_HALVES:,}."
        )
    unknown = sorted(set(pattern) - {*HALVES, STAGE, FURTHER_TOKENS})
    if unknown:
        raise ConfigError(
            f"{flag}: {unknown[0]!r} stands for no half of a layer. The letters are {', '.join(HALVES)}."
        )
    parts = main.split(STAGE)
    halves: list[Half] = []
    for segment, part in enumerate(parts):
        halves += [Half(HALVES[letter], segment) for letter in part]
    return PatternHalves(tuple(halves), len(parts), tuple(filter(None, further)))
